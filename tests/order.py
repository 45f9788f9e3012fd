"""What each file of the suite takes: the order in which they run, and which are quick.

python -m tests.order quick   print the files that `make quick` runs
python -m tests.order sum     print the seconds of `make test`, and of the long tests

A run with `--measure` writes what its tests took into the table, tests/file_seconds.txt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).parent / "file_seconds.txt"
UNKNOWN_S = 1.0
"""What a file takes that is not in the table, because it is new or was never measured."""

QUICK_S = 60.0
"""What `make quick` may take on one core, loading modules not counted."""

ALWAYS = (
    "tests/test_layers.py",
    "tests/package/test_rooms.py",
    "tests/test_names.py",
    "tests/test_sizes.py",
    "tests/test_startup.py",
    "tests/test_documents.py",
)
"""These see a change in any room."""

SLOW_ROOMS = frozenset(
    {"containers", "dashboard", "deploy", "e2e", "faults", "integrations", "proxy", "netlab"}
)
"""Each of their files starts processes, a browser or networks."""


class Durations(NamedTuple):
    """Seconds of a file: of the tests that `make test` runs, and of its long ones."""

    usual_s: float = UNKNOWN_S
    long_s: float = 0.0


def seconds() -> dict[str, Durations]:
    """Return how long each file takes, as far as it is known."""
    rows = (line.split() for line in TABLE.read_text().splitlines())
    return {path: Durations(float(usual_s), float(long_s)) for usual_s, long_s, path in rows}


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in their order, those of one file together.

    Files that start whole clusters keep every core busy by fits and wait for the rest of the time;
    between any two of them comes what the other tests take meanwhile.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    known = seconds()
    durations = {
        name: _duration_s(own, known.get(name, Durations())) for name, own in files.items()
    }
    clusters = {name for name, own in files.items() if own[0].get_closest_marker("e2e")}
    placed = {**places(durations, clusters), **places(durations, files.keys() - clusters)}
    return [item for name in sorted(files, key=lambda name: placed[name]) for item in files[name]]


def _duration_s(items: Sequence[pytest.Item], known: Durations) -> float:
    """Return how long these tests of a file take."""
    long = {item.get_closest_marker("long") is not None for item in items}
    return (known.usual_s if False in long else 0.0) + (known.long_s if True in long else 0.0)


def places(durations: dict[str, float], names: Iterable[str]) -> dict[str, tuple[float, str]]:
    """Return where files stand between 0 and 1, the longest first, each by what comes before it."""
    queue = sorted(names, key=lambda name: (-durations[name], name))
    whole_s = sum(durations[name] for name in queue) or 1.0
    found, before_s = {}, 0.0
    for name in queue:
        found[name] = (before_s / whole_s, name)
        before_s += durations[name]
    return found


def quick() -> list[str]:
    """Return the files of `make quick`: of every room the quickest, within `QUICK_S`.

    Rooms take turns, each with its next quickest file, so none is left out.
    """
    known = {path: durations.usual_s for path, durations in seconds().items()}
    rooms: dict[str, list[tuple[float, str]]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        room = "/".join(path.parent.relative_to(ROOT / "tests").parts[:2])
        if room.partition("/")[0] not in SLOW_ROOMS and name not in ALWAYS:
            rooms.setdefault(room, []).append((known.get(name, UNKNOWN_S), name))
    found, left_s = list(ALWAYS), QUICK_S - sum(known.get(name, UNKNOWN_S) for name in ALWAYS)
    while rooms:
        for room in sorted(rooms, key=lambda room: min(rooms[room])):
            duration_s, name = min(rooms[room])
            if duration_s > left_s:
                del rooms[room]
                continue
            rooms[room].remove((duration_s, name))
            found.append(name)
            left_s -= duration_s
        rooms = {room: files for room, files in rooms.items() if files}
    return found


class EachOnce(LoadFileScheduling):  # type: ignore[misc]
    """Files to workers, and no test twice.

    What a test that ends its worker leaves of its file goes to another worker. As xdist has it, the
    test itself, too: one that hangs until it is given up hangs again and again.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker; return the test that it was at when it ended."""
        files: list[dict[str, bool]] = list(self.assigned_work[node].values())
        crashed = next((name for file in files for name, ended in file.items() if not ended), None)
        for file in files:
            if crashed in file:
                file[crashed] = True
        super().remove_node(node)
        return crashed


class Measure:
    """A plugin that writes what the tests of a run took; other files keep what they have."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool], float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one part of a test: its setup, its call or what is done after it."""
        key = (report.nodeid.partition("::")[0], "long" in report.keywords)
        self._found[key] = self._found.get(key, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the table, without files that are gone."""
        known = seconds()
        for path, long in self._found:
            durations = known.get(path, Durations(0.0))
            new_s = self._found[path, long]
            known[path] = durations._replace(**{"long_s" if long else "usual_s": new_s})
        there = {path: durations for path, durations in known.items() if (ROOT / path).exists()}
        rows = [(-durations.usual_s, -durations.long_s, path) for path, durations in there.items()]
        TABLE.write_text("".join(f"{-u:.1f} {-s:.1f} {path}\n" for u, s, path in sorted(rows)))


def main() -> int:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["quick"]:
            print("\n".join(quick()))
        case ["sum"]:
            durations = seconds().values()
            print(f"{sum(t.usual_s for t in durations):.0f} {sum(t.long_s for t in durations):.0f}")
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
