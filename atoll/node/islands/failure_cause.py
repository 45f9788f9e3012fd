"""How the ranks of an island ended, and which of them was the cause. No I/O but reading."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, OutOfMemory, RankLost, from_dict
from atoll.island.start_phase import RankPhase, describe, on_the_way
from atoll.node.processes.exits import explain_exit
from atoll.wire.limits import DEAD_AFTER_S, EXIT_LEFT, EXIT_REPLACED, HEARTBEAT_S

GOOD = frozenset({0, EXIT_LEFT, EXIT_REPLACED})
"""Exit statuses of a process that has done what it was to do."""

PORT_TAKEN = "EADDRINUSE"
"""What torch says when another process has taken the port of the first rank."""


def error_file(rank: int) -> str:
    """Return the name of the file where a rank leaves its error for the island's supervisor."""
    return f"error-{rank}.json"


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended by itself."""

    rank: int
    code: int
    """As of `subprocess`: negative for a signal."""
    error: AtollError | None = None
    """What it wrote into its file."""
    oom_kills: int = 0
    """How many processes the kernel of its machine killed for want of memory while it ran."""
    follower: str = ""
    """Which follower host reported it, e.g. `w0.1 on far`; empty: it ran on the first machine."""
    lost: bool = False
    """How it ended is unknown: its machine does not answer any more."""

    @classmethod
    def read(cls, rank: int, code: int, *, folder: Path, oom_kills: int = 0) -> RankExit:
        """Return the end of a rank, with the error that it wrote down if it did."""
        error = None
        if code > 0:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                error = from_dict(json.loads((folder / error_file(rank)).read_text("utf-8")))
        return cls(rank, code, error, oom_kills)

    @classmethod
    def of_lost_machine(cls, follower: str, *, had: range, ranks: int, why: str) -> RankExit:
        """Return the end of the first rank of a machine that does not answer any more.

        Args:
            follower: Its name.
            had: The ranks there.
            ranks: Of the island.
            why: How that was noticed.
        """
        numbers = f"rank {had[0]}" if len(had) == 1 else f"ranks {had[0]} to {had[-1]}"
        error = RankLost(
            "a machine of an island is gone",
            given=f"{follower} with {numbers} of {ranks}: {why}",
            expected=f"a heartbeat every {HEARTBEAT_S:.0f} s, at least one in {DEAD_AFTER_S:.0f} s",
            remedy="look at that machine, its network and its last lines: atoll logs",
        )
        return cls(had[0], 1, error, follower=follower, lost=True)

    @property
    def good(self) -> bool:
        """Whether it has come to its end."""
        return self.code in GOOD

    @property
    def follows(self) -> bool:
        """Whether it failed only because another one is gone."""
        return isinstance(self.error, RankLost) and not self.lost

    @property
    def port_taken(self) -> bool:
        """Whether it failed because the port of the island was taken meanwhile."""
        return self.error is not None and PORT_TAKEN in str(self.error.given)

    @property
    def status(self) -> int:
        """The same as the exit status of a process that was not itself killed by the signal."""
        return self.code if self.code >= 0 else 128 - self.code


def root_cause(ends: Sequence[RankExit]) -> RankExit:
    """Return the end, among those that are not good, to which the others are due.

    Args:
        ends: In the order in which they happened; not all are good.
    """
    bad = [end for end in ends if not end.good]
    return next((end for end in bad if not end.follows), bad[0])


def explain(
    end: RankExit, *, member: str, phases: Mapping[int, RankPhase], timeout_s: float
) -> AtollError:
    """Return the error of an island of which one rank has failed.

    Args:
        end: Of the rank that was the cause.
        member: Which member the island is.
        phases: How far each of its ranks has come at its start.
        timeout_s: How long they wait for each other.
    """
    ranks = len(phases)
    if end.follows and on_the_way(phases):
        return RankLost(
            f"the ranks of {member} did not begin together",
            given=describe(phases),
            expected=f"that none waits longer than timeout_s = {timeout_s:g} in [island]",
            remedy="look at the last lines of the rank that is behind: atoll logs; a machine that "
            "is only slow needs a longer timeout_s",
        )
    where = f" ({end.follower})" if end.follower else ""
    if end.error is None:
        name = f"rank {end.rank} of the {ranks} of {member}{where}"
        return explain_exit(end.code, member=name, oom_kills=end.oom_kills)
    fields = end.error.to_dict()
    if not (end.follows or end.lost):
        given = [fields["given"]] if "given" in fields else []
        fields["given"] = ", ".join([*given, f"rank {end.rank} of {ranks}{where}"])
    return from_dict(fields)


def died(end: RankExit, error: AtollError) -> bool:
    """Return whether a rank is gone through no fault of the program: killed, or out of memory."""
    if end.lost or isinstance(error, OutOfMemory):
        return True
    return end.code < 0 and end.code != -signal.SIGTERM
