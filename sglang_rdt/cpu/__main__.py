"""``python -m sglang_rdt.cpu install | uninstall | status``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_rdt.cpu import pth


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: for ``status`` 0 if the stand-ins are installed, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sglang_rdt.cpu",
        description="Stand-ins that let SGLang and Megatron-core start on a machine without a GPU, "
        "for every process of this Python environment.",
    )
    parser.add_argument("command", choices=("install", "uninstall", "status"))
    command = parser.parse_args(argv).command
    if command == "install":
        print(f"CPU stand-ins installed: {pth.install()}")
    elif command == "uninstall":
        removed = pth.uninstall()
        print(f"CPU stand-ins {'removed' if removed else 'were not installed'}: {pth.location()}")
    else:
        print(f"CPU stand-ins {'' if pth.is_installed() else 'not '}installed: {pth.location()}")
        return 0 if pth.is_installed() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
