"""What each file of the suite takes: the order in which they run, and which are quick.

python -m tests.order measure LOG   write the table anew, from a run with `--durations=0`
python -m tests.order quick         print the files that `make quick` runs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).parent / "file_seconds.txt"
UNKNOWN_S = 1.0
"""What a file takes that is not in the table, because it is new or was never measured."""

QUICK_S = 60.0
"""What `make quick` may take on one core, loading modules not counted."""

ALWAYS = (
    "tests/test_layers.py",
    "tests/test_names.py",
    "tests/test_startup.py",
    "tests/test_documents.py",
)
"""These see a change in any room."""

SLOW_ROOMS = frozenset(
    {"containers", "dashboard", "deploy", "e2e", "faults", "integrations", "proxy", "netlab"}
)
"""Each of their files starts processes, a browser or networks."""


def seconds() -> dict[str, float]:
    """Return how long each file takes, as far as it is known."""
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
    queue = sorted(names, key=lambda name: (-known.get(name, UNKNOWN_S), name))
    whole_s = sum(known.get(name, UNKNOWN_S) for name in queue)
    found, before_s = {}, 0.0
    for name in queue:
        found[name] = (before_s / whole_s, name)
        before_s += known.get(name, UNKNOWN_S)
    return found


def quick() -> list[str]:
    """Return the files of `make quick`: of every room the quickest, within `QUICK_S`.

    Rooms take turns, each with its next quickest file, so none is left out.
    """
    known = seconds()
    rooms: dict[str, list[tuple[float, str]]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        room = "/".join(path.parent.relative_to(ROOT / "tests").parts[:2])
        if room.partition("/")[0] not in SLOW_ROOMS and name not in ALWAYS:
            rooms.setdefault(room, []).append((known.get(name, UNKNOWN_S), name))
    found, left_s = list(ALWAYS), QUICK_S - sum(known.get(name, UNKNOWN_S) for name in ALWAYS)
    while rooms:
        for room in sorted(rooms, key=lambda room: min(rooms[room])):
            taken_s, name = min(rooms[room])
            if taken_s > left_s:
                del rooms[room]
                continue
            rooms[room].remove((taken_s, name))
            found.append(name)
            left_s -= taken_s
        rooms = {room: files for room, files in rooms.items() if files}
    return found


def measured(log: str) -> dict[str, float]:
    """Return the sum of a log's durations by file."""
    found: dict[str, float] = {}
    for taken_s, path in re.findall(r"(?m)^([\d.]+)s (?:call|setup|teardown) +([^:]+)::", log):
        found[path] = found.get(path, 0.0) + float(taken_s)
    return found


def main() -> int:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["quick"]:
            print("\n".join(quick()))
        case ["measure", log]:
            found = measured(Path(log).read_text())
            rows = sorted(((taken_s, path) for path, taken_s in found.items()), reverse=True)
            TABLE.write_text("".join(f"{t:.1f} {path}\n" for t, path in rows))
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
