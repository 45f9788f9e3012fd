"""What is known of running policies: returns so far, and the newest figures of every member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_RETURNS = 512
"""Values kept per member; every second one of a longer row goes: its past gets coarser."""

CRITIC_AWAY_S = 8.0
"""An actor that has heard no critic for so long goes on with the last one, and that is shown."""


@dataclass(slots=True)
class Returns:
    """The returns of every member in the order in which they were measured."""

    by_member: dict[str, list[float]] = field(default_factory=dict)

    def take(self, point: Mapping[str, Any]) -> None:
        """Keep the return of a measurement, if it tells one."""
        value = point["values"].get("return")
        if value is None:
            return
        row = self.by_member.setdefault(str(point["member"]), [])
        row.append(float(value))
        if len(row) > MAX_RETURNS:
            del row[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNow:
    """One policy as it stands, all its actors together."""

    policy: str
    env: str
    steps: int
    """Environment steps it is to do."""
    members: list[dict[str, Any]]
    """Its actors, as the hub shows them."""
    returns: list[float]
    """Of its first actor, oldest first."""

    @property
    def env_steps(self) -> float:
        """Environment steps so far."""
        return self._sum("env_steps")

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second of the actors that are at work."""
        return self._sum("env_steps_per_s", live=True)

    @property
    def queue_wait_s(self) -> float:
        """Seconds its actors have waited for room in their queues."""
        return self._sum("queue_wait_s")

    @property
    def value_version(self) -> int:
        """The newest critic that one of them has."""
        return int(max((value(m, "value_version") or 0.0 for m in self.members), default=0.0))

    @property
    def best(self) -> float | None:
        """The best mean return so far."""
        told = [value(member, "return_best") for member in self.members]
        known = [one for one in told if one is not None]
        return max(known) if known else max(self.returns, default=None)

    @property
    def now(self) -> float | None:
        """The mean return of the last episodes."""
        told = [value(member, "return") for member in self.members]
        known = [one for one in told if one is not None]
        return sum(known) / len(known) if known else None

    @property
    def critic_away_s(self) -> float:
        """Seconds since the critic was heard, if that is worth a word; else 0."""
        live = [m for m in self.members if m["state"] == "running"]
        ages = [value(member, "value_age_s") or 0.0 for member in live]
        longest = max(ages, default=0.0)
        return longest if longest > CRITIC_AWAY_S else 0.0

    def _sum(self, name: str, *, live: bool = False) -> float:
        counted = [m for m in self.members if not live or m["state"] == "running"]
        return sum(value(member, name) or 0.0 for member in counted)


def value(member: Mapping[str, Any], name: str) -> float | None:
    """Return the newest measurement of a member, or None."""
    found = (member.get("values") or {}).get(name)
    return None if found is None else float(found)


def policies_of(
    seats: Sequence[Mapping[str, Any]], members: Sequence[dict[str, Any]], returns: Returns
) -> list[PolicyNow]:
    """Return the policies in the order of the job file.

    Args:
        seats: What each slot does, as the hub tells it.
        members: The members of the job, as the hub shows them.
        returns: What was measured so far.
    """
    by_slot = {member["slot"]: member for member in members}
    found: dict[str, PolicyNow] = {}
    for slot, seat in enumerate(seats):
        if seat["role"] != "actor":
            continue
        name, member = str(seat["policy"]), by_slot.get(slot)
        known = found.setdefault(
            name,
            PolicyNow(
                policy=name, env=str(seat["env"]), steps=int(seat["steps"]), members=[], returns=[]
            ),
        )
        if member is not None:
            known.members.append(member)
            if not known.returns:
                known.returns.extend(returns.by_member.get(str(member["member"]), ()))
    return list(found.values())


def critic_of(
    seats: Sequence[Mapping[str, Any]], members: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the member that is the critic, or the learner; None where there is none."""
    slots = [slot for slot, seat in enumerate(seats) if seat["role"] != "actor"]
    return next((member for member in members if member["slot"] in slots), None)


def share_done(policies: Sequence[PolicyNow]) -> float:
    """Return the share of all policies' environment steps that is done."""
    wanted = sum(policy.steps for policy in policies)
    done = sum(min(policy.env_steps, policy.steps) for policy in policies)
    return done / wanted if wanted else 0.0


def left_s(policies: Sequence[PolicyNow]) -> float | None:
    """Return the time until the last policy is done, as fast as they are now; None: not known."""
    waits = [
        (policy.steps - policy.env_steps) / policy.steps_per_s
        for policy in policies
        if policy.steps_per_s > 0
    ]
    return max(0.0, *waits) if waits else None


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return a row of numbers as a row of bars, the lowest to the highest of them."""
    if not values:
        return ""
    count = min(width, len(values))
    cells = [
        values[len(values) * k // count : len(values) * (k + 1) // count] for k in range(count)
    ]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int(8 * (mean - low) / span))] for mean in means)
