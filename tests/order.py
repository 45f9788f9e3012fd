"""The order in which the files of the suite run: long ones first, clusters beside the others.

`python -m tests.order LOG` writes the table anew from the log of a run with `--durations=0`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

TABLE = Path(__file__).parent / "long_files.txt"
LONG_S = 8.0
"""Files that take less are not in the table: they fill what the others leave."""


def seconds() -> dict[str, float]:
    """Return how long each long file takes, as far as it is known."""
    rows = (line.split() for line in TABLE.read_text().splitlines())
    return {path: float(taken_s) for taken_s, path in rows}


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in their order, those of one file together.

    Files that start whole clusters keep every core busy by fits and wait for the rest of the time;
    between any two of them comes what the other tests take meanwhile.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    clusters = {name for name, own in files.items() if own[0].get_closest_marker("e2e")}
    placed = {**places(clusters), **places(files.keys() - clusters)}
    return [item for name in sorted(files, key=lambda name: placed[name]) for item in files[name]]


def places(names: Iterable[str]) -> dict[str, tuple[float, str]]:
    """Return where files stand between 0 and 1, the longest first, each by what comes before it."""
    known = seconds()
    queue = sorted(names, key=lambda name: (-known.get(name, 1.0), name))
    whole_s = sum(known.get(name, 1.0) for name in queue)
    found, before_s = {}, 0.0
    for name in queue:
        found[name] = (before_s / whole_s, name)
        before_s += known.get(name, 1.0)
    return found


def measured(log: str) -> dict[str, float]:
    """Return the sum of a log's durations by file."""
    found: dict[str, float] = {}
    for taken_s, path in re.findall(r"(?m)^([\d.]+)s (?:call|setup|teardown) +([^:]+)::", log):
        found[path] = found.get(path, 0.0) + float(taken_s)
    return found


def main() -> int:
    """Write the table from a log."""
    found = measured(Path(sys.argv[1]).read_text())
    rows = sorted(((taken_s, path) for path, taken_s in found.items()), reverse=True)
    TABLE.write_text("".join(f"{t:.0f} {path}\n" for t, path in rows if t >= LONG_S))
    return 0


if __name__ == "__main__":
    sys.exit(main())
