"""How much memory the contributions of a job and of each member may take at its reducer."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

from atoll.errors import LimitReached
from atoll.reducer.phases import Phase
from atoll.wire.chunks import ChunkHead

MEMBER, JOB = "reducer_member", "reducer_job"
"""Names of the quotas, as the hub tells them."""
REPORTED = 8
"""Members that a heartbeat names: those that hold most."""


class MemoryQuota:
    """Counts what the phases of a reducer hold, and refuses what is too much."""

    def __init__(self, limits: Callable[[], Mapping[str, int]]) -> None:
        """Keep to `limits`, in bytes by the name of the quota; 0 or absent: none."""
        self._limits = limits
        self._refused: collections.Counter[str] = collections.Counter()
        """By member; under an empty name because of the job's limit."""

    def check(self, member: str, head: ChunkHead, phase: Phase, phases: Iterable[Phase]) -> None:
        """Raise LimitReached if a member's contribution does not fit beside the others."""
        if phase.assembly.started(member):
            return
        limits, held, more = self._limits(), held_by_member(phases), max(0, head.total_bytes)
        for name, limit, used in (
            (member, limits.get(MEMBER, 0), held[member]),
            ("", limits.get(JOB, 0), held.total()),
        ):
            if 0 < limit < used + more:
                self._refused[name] += 1
                whose = f"of {member}" if name else "of this job's members"
                raise LimitReached(
                    f"the contributions {whose} take too much of the reducer's memory",
                    given=f"{used} bytes held, {more} more from {member}",
                    expected=f"at most {limit} bytes ({MEMBER if name else JOB} in the hub's "
                    "quotas.toml)",
                    remedy="a codec with fewer bytes, or a smaller model; or let the hub's owner "
                    "raise the limit",
                )

    def figures(self, phases: Iterable[Phase]) -> dict[str, float]:
        """Return what a heartbeat says: bytes held and refusals, of the job and of members."""
        held = held_by_member(phases)
        return {
            "held_bytes": float(held.total()),
            "refused": float(self._refused[""]),
            **{f"held_bytes/{name}": float(size) for name, size in held.most_common(REPORTED)},
            **{
                f"refused/{name}": float(times)
                for name, times in self._refused.most_common(REPORTED)
                if name
            },
        }


def held_by_member(phases: Iterable[Phase]) -> collections.Counter[str]:
    """Return the bytes held of every member's contributions."""
    held: collections.Counter[str] = collections.Counter()
    for phase in phases:
        held.update(phase.assembly.held())
    return held
