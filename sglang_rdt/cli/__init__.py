"""The ``sglang-rdt`` command."""

from __future__ import annotations


def main() -> None:
    """Console entry point; one line instead of a traceback for errors of this package."""
    import sys

    from sglang_rdt.cli.app import app
    from sglang_rdt.errors import RdtError

    try:
        app()
    except RdtError as error:
        print(f"sglang-rdt: {error}", file=sys.stderr)
        raise SystemExit(1) from None
