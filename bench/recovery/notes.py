"""Reading what the processes of a run note, while they run, and the figures in it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Trouble(Exception):
    """Something that a scenario waited for did not happen in time."""


def until(condition: Callable[[], T | None], what: str, *, timeout_s: float) -> T:
    """Return what `condition` returns once it is true.

    Raises:
        Trouble: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Trouble(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return found


@dataclass
class Traced:
    """One process and what it noted so far."""

    member: str
    path: Path
    notes: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _rest: bytes = b""

    def refresh(self) -> None:
        """Read what has been added."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.notes += [json.loads(line) for line in lines]

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.path.stem.rpartition("-")[2])

    def moment(self, kind: str) -> float:
        """Return when something was first noted; 0.0 if never."""
        return next((float(n["at"]) for n in self.notes if n["kind"] == kind), 0.0)

    def steps(self) -> list[dict[str, Any]]:
        """Return the notes of steps."""
        return [note for note in self.notes if note["kind"] == "step"]

    def commits(self) -> list[dict[str, Any]]:
        """Return the notes of steps that ended with a committed round."""
        return [note for note in self.notes if "digest" in note and note["kind"] == "step"]

    def gap_after(self, moment: float) -> float | None:
        """Return the seconds between the last commit before a moment and the first after it."""
        times = [float(note["at"]) for note in self.commits()]
        before = [at for at in times if at <= moment]
        after = [at for at in times if at > moment]
        return after[0] - before[-1] if before and after else None

    def normal_gap(self, *, until_: float, last: int = 4) -> float:
        """Return the median seconds between commits, of the last few before a moment."""
        times = [float(note["at"]) for note in self.commits() if note["at"] <= until_]
        gaps = [b - a for a, b in zip(times[-last - 1 :], times[-last:], strict=False)]
        return statistics.median(gaps) if gaps else 0.0


class Watch:
    """All processes that note into one folder."""

    def __init__(self, folder: Path) -> None:
        """Start with what is there."""
        self._folder = folder
        self._traced: dict[Path, Traced] = {}

    def all(self) -> list[Traced]:
        """Return every process, in the order of their starts."""
        for path in self._folder.glob("w*-*.jsonl"):
            self._traced.setdefault(path, Traced(path.name.partition("-")[0], path))
        for one in self._traced.values():
            one.refresh()
        return sorted(
            (one for one in self._traced.values() if one.notes), key=lambda t: t.moment("started")
        )

    def newest(self, member: str, *, besides: Sequence[int] = ()) -> Traced | None:
        """Return the newest process of a member, if its id is none of `besides`."""
        found = [t for t in self.all() if t.member == member and t.pid not in besides]
        return found[-1] if found else None

    def differing_rounds(self) -> list[int]:
        """Return the rounds after which not all processes had the same parameters."""
        digests: dict[int, set[str]] = {}
        for one in self.all():
            for note in one.notes:
                if "digest" in note:
                    digests.setdefault(int(note["round"]), set()).add(str(note["digest"]))
        return sorted(round_ for round_, found in digests.items() if len(found) > 1)

    def compared_rounds(self) -> int:
        """Return how many rounds at least two processes noted the parameters of."""
        counts: dict[int, int] = {}
        for one in self.all():
            for round_ in {int(note["round"]) for note in one.notes if "digest" in note}:
                counts[round_] = counts.get(round_, 0) + 1
        return sum(count > 1 for count in counts.values())
