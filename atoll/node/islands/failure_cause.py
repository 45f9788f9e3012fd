"""How the ranks of an island ended, and which of them was the cause."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, OutOfMemory, RankLost, from_dict
from atoll.island.start_phase import RankPhase, describe, on_the_way
from atoll.node.processes.exits import explain_exit, read_error
from atoll.wire.limits import DEAD_AFTER_S, EXIT_LEFT, EXIT_REPLACED, HEARTBEAT_S

GOOD = frozenset({0, EXIT_LEFT, EXIT_REPLACED})
"""Exit statuses of success."""

PORT_TAKEN = "EADDRINUSE"
"""torch's error if another process has taken the port of rank 0."""


def error_file(rank: int) -> str:
    """Return the name of the file in which a rank stores its error for the supervisor."""
    return f"error-{rank}.json"


@dataclass(frozen=True, slots=True)
class RankExit:
    """Exit of one rank."""

    rank: int
    code: int
    """As of `subprocess`: negative for a signal."""
    error: AtollError | None = None
    """From its error file."""
    oom_kills: int = 0
    """Processes on its host that the kernel killed for lack of memory while it ran."""
    follower: str = ""
    """The follower host that reported it, e.g. `w0.1 on far`; empty: the first host."""
    lost: bool = False
    """The exit is unknown: its host does not answer any more."""

    @classmethod
    def read(cls, rank: int, code: int, *, folder: Path, oom_kills: int = 0) -> RankExit:
        """Return the exit of a rank, with the error from its file, if any."""
        error = read_error(folder / error_file(rank)) if code > 0 else None
        return cls(rank, code, error, oom_kills)

    @classmethod
    def of_lost_machine(cls, follower: str, *, had: range, ranks: int, why: str) -> RankExit:
        """Return an exit for a lost host that had the ranks `had` of `ranks`, by its first rank."""
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
        """Whether it succeeded."""
        return self.code in GOOD

    @property
    def follows(self) -> bool:
        """Whether it failed only because another rank was lost."""
        return isinstance(self.error, RankLost) and not self.lost

    @property
    def port_taken(self) -> bool:
        """Whether it failed because another process took the island's port."""
        return self.error is not None and PORT_TAKEN in str(self.error.given)

    @property
    def status(self) -> int:
        """As an exit status: a signal becomes 128 plus its number."""
        return self.code if self.code >= 0 else 128 - self.code


def root_cause(ends: Sequence[RankExit]) -> RankExit:
    """Return the failed exit that caused the others; `ends` are in order of occurrence."""
    bad = [end for end in ends if not end.good]
    return next((end for end in bad if not end.follows), bad[0])


def explain(
    end: RankExit, *, member: str, phases: Mapping[int, RankPhase], timeout_s: float
) -> AtollError:
    """Return the error of an island from the exit of the causing rank and the startup progress.

    Ranks wait `timeout_s` for each other.
    """
    ranks = len(phases)
    if end.follows and on_the_way(phases):
        return RankLost(
            f"the ranks of {member} did not begin together",
            given=describe(phases),
            expected=f"that none waits longer than timeout_s = {timeout_s:g} in [island]",
            remedy="see the last lines of the rank that is behind: atoll logs; a machine that "
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
    """Return whether a rank was killed or ran out of memory, without a fault of the program."""
    if end.lost or isinstance(error, OutOfMemory):
        return True
    return end.code < 0 and end.code != -signal.SIGTERM
