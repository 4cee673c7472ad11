"""The file of what passed: records of tests, merged from run to run."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name(".families.json")
FIELDS = ("family", "trainer", "engine", "bridge", "mode", "dtype", "fp8")
MODES = ("", "direct", "bucketed", "both")
PACKAGES = ("sglang", "megatron-core", "mbridge", "megatron-bridge", "transformers", "torch")

Record = dict[str, Any]


def checked(said: Mapping[str, str]) -> dict[str, str]:
    """All fields as text.

    Raises:
        ValueError: an unknown field or mode, no family, or something else than a line of text.
    """
    unknown = sorted(said.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"passed() does not know {', '.join(unknown)}; it takes {FIELDS}")
    for name, value in said.items():
        if not isinstance(value, str) or "\n" in value or "|" in value:
            raise ValueError(f"passed({name}={value!r}): a line of text was expected")
    if not said.get("family"):
        raise ValueError("passed() needs a family")
    if said.get("mode", "") not in MODES:
        raise ValueError(f"passed(mode={said['mode']!r}): one of {MODES} was expected")
    return {name: said.get(name, "") for name in FIELDS}


def versions() -> dict[str, str]:
    """Installed versions of what the tests are about."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Collected:
    """What the tests of one run said."""

    def __init__(self) -> None:
        self._said: dict[str, list[dict[str, str]]] = {}
        self._failed: set[str] = set()

    def add(self, test: str, when: str, outcome: str, said: Sequence[Mapping[str, str]]) -> None:
        """One report of pytest: a test has passed when its call has, and nothing of it failed."""
        if outcome == "failed":
            self._failed.add(test)
        elif when == "call" and outcome == "passed":
            self._said[test] = [dict(one) for one in said]

    def save(self, path: Path, today: str | None = None) -> None:
        """Merges it into the file; nothing is written where nothing has changed.

        Args:
            today: ISO date.
        """
        if not self._said and not self._failed:
            return
        date = today or datetime.datetime.now(datetime.UTC).date().isoformat()
        with _locked(path):
            old = load(path)
            new = merged(old, self._said, self._failed, date, versions())
            if new != old:
                path.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> list[Record]:
    """The records of a file; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def merged(
    old: Sequence[Record],
    said: Mapping[str, Sequence[Mapping[str, str]]],
    failed: set[str],
    date: str,
    installed: Mapping[str, str],
) -> list[Record]:
    """The records after a run: those of tests that ran are replaced, those of tests that failed are
    gone. One that says the same as before keeps its date, so that a run that proves nothing new
    changes nothing."""
    kept = [r for r in old if r["test"] not in said and r["test"] not in failed]
    before = {_key(r): r for r in old}
    for test, records in said.items():
        if test in failed:
            continue
        for fields in records:
            record = {"test": test, **fields, "date": date, "versions": dict(installed)}
            same = before.get(_key(record))
            kept.append(same if same and same["versions"] == record["versions"] else record)
    return sorted({_key(r): r for r in kept}.values(), key=_key)


def _key(record: Record) -> tuple[str, ...]:
    return tuple(record[name] for name in ("test", *FIELDS))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Processes of one run (pytest-xdist) write one after the other."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
