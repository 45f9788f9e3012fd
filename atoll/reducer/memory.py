"""Quotas on the reducer's memory for contributions, per member and per job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from atoll.errors import LimitReached
from atoll.reducer.phases import Phase

MEMBER, JOB = "reducer_member", "reducer_job"
"""Names of the quotas, as the hub names them."""
REPORTED = 8
"""Members that a heartbeat names: those that hold most."""


class MemoryQuota:
    """Refuses contributions that would exceed a quota."""

    def __init__(
        self, limits: Callable[[], Mapping[str, int]], *, held: Callable[[], Counter[str]]
    ) -> None:
        """Enforce `limits`, quota name -> bytes; 0 or absent: unlimited.

        `held` returns the bytes held per member; the key "" counts bytes that belong to no member.
        """
        self._limits, self._held = limits, held
        self._refused: Counter[str] = Counter()
        """Refusals by member; the key "" counts those by the job's limit."""

    def check(self, member: str, more: int) -> None:
        """Raise LimitReached if `more` bytes would exceed the limit of the member or of the job."""
        if more <= 0:
            return
        limits, held = self._limits(), self._held()
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

    def figures(self) -> dict[str, float]:
        """Return the figures of a heartbeat: bytes held and refusals, of the job and of members."""
        held, refused = self._held(), self._refused.copy()  # other threads refuse meanwhile
        total = held.total()
        del held[""]
        return {
            "held_bytes": float(total),
            "refused": float(refused[""]),
            **{f"held_bytes/{name}": float(size) for name, size in held.most_common(REPORTED)},
            **{
                f"refused/{name}": float(times)
                for name, times in refused.most_common(REPORTED)
                if name
            },
        }


def held_by_member(phases: Iterable[Phase]) -> Counter[str]:
    """Return the bytes held of every member's contributions."""
    held: Counter[str] = Counter()
    for phase in phases:
        held.update(phase.assembly.held())
    return held
