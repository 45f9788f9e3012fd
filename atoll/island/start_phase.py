"""How far a rank has come during startup, in a file that its supervisor reads.

During startup ranks wait for each other in collectives. If one is missing, all others time out
without knowing which; the supervisor finds it by comparing phases.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

OURS, EDGE = f"{os.sep}atoll{os.sep}", f"{os.sep}atoll{os.sep}node{os.sep}"
"""A timeout is reported with the innermost line of Atoll, excluding `atoll/node`."""


class StartPhase(StrEnum):
    """Phases of startup, in order."""

    LOADING = "loading"
    """Imports, or a script before its first call."""
    JOINING = "joining the job"
    MEETING = "meeting the other ranks"
    PREPARING = "preparing"
    """Rank 0 reads data and builds the whole model."""
    WAITING = "waiting for rank 0"
    BUILDING = "building the model"
    DIVIDING = "dividing the model"
    FILLING = "filling the model"
    """Receives the values of rank 0."""
    READY = "ready"


ORDER = tuple(StartPhase)


@dataclass(frozen=True, slots=True)
class RankPhase:
    """The phase of one rank."""

    phase: StartPhase = StartPhase.LOADING
    at: str = ""
    """Line at which it gave up, e.g. `gather_scatter.py:82`; empty: it did not."""

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankPhase:
        """Return a rank's written phase, by default loading."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((folder / phase_file(rank)).read_text(encoding="utf-8"))
            return cls(StartPhase(found["phase"]), str(found["at"]))
        return cls()

    def __str__(self) -> str:
        return f"{self.phase} at {self.at}" if self.at else str(self.phase)


def phase_file(rank: int) -> str:
    """Return the name of a rank's phase file."""
    return f"phase-{rank}.json"


class StartReport:
    """Writes one rank's phase; without a folder it does nothing."""

    def __init__(self, folder: Path | None = None, *, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank

    def enter(self, phase: StartPhase) -> None:
        """Start a phase."""
        self._write(RankPhase(phase))

    def fail(self, error: BaseException) -> None:
        """Record the line of Atoll at which an error occurred."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if OURS in frame.filename and EDGE not in frame.filename]
        if self._folder is not None and ours:
            at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
            self._write(RankPhase(RankPhase.read(self._folder, self._rank).phase, at))

    def _write(self, phase: RankPhase) -> None:
        if self._folder is None:
            return
        path = self._folder / phase_file(self._rank)
        partial = path.with_suffix(".part")
        with contextlib.suppress(OSError):  # on a full disk a later message is only less precise
            partial.write_text(json.dumps(asdict(phase)), encoding="utf-8", newline="\n")
            partial.replace(path)


def started(phases: Mapping[int, RankPhase]) -> bool:
    """Return whether all ranks are ready."""
    return all(one.phase is StartPhase.READY for one in phases.values())


def on_the_way(phases: Mapping[int, RankPhase]) -> bool:
    """Return whether some ranks are past loading, but not all ready.

    Ranks of a script that never calls `join` stay at loading.
    """
    moved = any(one.phase is not StartPhase.LOADING for one in phases.values())
    return moved and not started(phases)


def describe(phases: Mapping[int, RankPhase]) -> str:
    """Return which ranks are behind, and all phases, e.g. `rank 1 is behind: rank 1 ...`."""
    least = min(ORDER.index(one.phase) for one in phases.values())
    behind = [rank for rank, one in phases.items() if ORDER.index(one.phase) == least]
    where: defaultdict[str, list[int]] = defaultdict(list)
    for rank, one in sorted(phases.items()):
        where[str(one)].append(rank)
    each = "; ".join(f"{_ranks(found)}: {text}" for text, found in where.items())
    if len(behind) == len(phases):
        return f"no rank is ahead, they wait for each other; {each}"
    verb = "is" if len(behind) == 1 else "are"
    return f"{_ranks(behind)} {verb} behind; {each}"


def _ranks(numbers: list[int]) -> str:
    text = ", ".join(map(str, sorted(numbers)))
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"
