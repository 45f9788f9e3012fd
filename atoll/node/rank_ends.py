"""How the ranks of an island ended, and which of them was the cause. Pure."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, OutOfMemory, RankLost, from_dict
from atoll.node.exits import explain_exit
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED

GOOD = frozenset({0, EXIT_LEFT, EXIT_REPLACED})
"""Exit statuses of a process that has done what it was to do."""

PORT_TAKEN = "EADDRINUSE"
"""What torch says when another process has taken the port of the first rank."""


def error_file(rank: int) -> str:
    """Return the name of the file where a rank leaves its error for the island's keeper."""
    return f"error-{rank}.json"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended by itself."""

    rank: int
    code: int
    """As of `subprocess`: negative for a signal."""
    error: AtollError | None = None
    """What it has left in its file."""

    @classmethod
    def read(cls, rank: int, code: int, *, folder: Path) -> RankEnd:
        """Return the end of a rank, with the error that it wrote down if it did."""
        error = None
        if code > 0:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                error = from_dict(json.loads((folder / error_file(rank)).read_text("utf-8")))
        return cls(rank, code, error)

    @property
    def good(self) -> bool:
        """Whether it has come to its end."""
        return self.code in GOOD

    @property
    def follows(self) -> bool:
        """Whether it failed only because another one is gone."""
        return isinstance(self.error, RankLost)

    @property
    def port_taken(self) -> bool:
        """Whether it failed because the port of the island was taken meanwhile."""
        return self.error is not None and PORT_TAKEN in str(self.error.given)

    @property
    def status(self) -> int:
        """The same as the exit status of a process that was not itself killed by the signal."""
        return self.code if self.code >= 0 else 128 - self.code


def cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the end, among those that are not good, to which the others are due.

    Args:
        ends: In the order in which they happened; not all are good.
    """
    bad = [end for end in ends if not end.good]
    return next((end for end in bad if not end.follows), bad[0])


def explain(end: RankEnd, *, member: str, ranks: int, oom_kills: int) -> AtollError:
    """Return the error of an island of which one rank has failed.

    Args:
        end: Of the rank that was the cause.
        member: Which member the island is.
        ranks: How many it has.
        oom_kills: How many processes the kernel killed for want of memory meanwhile.
    """
    if end.error is None:
        return explain_exit(
            end.code, member=f"rank {end.rank} of the {ranks} of {member}", oom_kills=oom_kills
        )
    told = end.error.to_dict()
    if not end.follows:
        given = [told["given"]] if "given" in told else []
        told["given"] = ", ".join([*given, f"rank {end.rank} of {ranks}"])
    return from_dict(told)


def died(end: RankEnd, error: AtollError) -> bool:
    """Return whether a rank is gone through no fault of the program: killed, or out of memory."""
    return isinstance(error, OutOfMemory) or (end.code < 0 and end.code != -signal.SIGTERM)
