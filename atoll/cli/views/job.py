"""What is known of a running job, put together from the hub's answers.

What is known of running policies: returns so far, and the newest figures of every member.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.net.http.client import HubClient
from atoll.wire.states import JobState, MemberState

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
        live = [m for m in self.members if m["state"] == MemberState.RUNNING]
        ages = [value(member, "value_age_s") or 0.0 for member in live]
        longest = max(ages, default=0.0)
        return longest if longest > CRITIC_AWAY_S else 0.0

    def _sum(self, name: str, *, live: bool = False) -> float:
        counted = [m for m in self.members if not live or m["state"] == MemberState.RUNNING]
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


ENDED = frozenset(state for state in JobState if state.ended)
"""States of a job that do not change by themselves."""

RATE_WINDOW_S = 20.0
"""Span over which the time that is left is estimated."""


@dataclass(slots=True)
class Watched:
    """A job as it was when it was last asked about."""

    job: str
    view: dict[str, Any] = field(default_factory=dict)
    """The hub's JobView."""
    loss: float | None = None
    """Mean of the members' last training losses."""
    held_out: float | None = None
    """Last loss on text that no member trains on."""
    parameters: int = 0
    """Numbers in the model, once a member has told."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """New events of the last refresh."""
    returns: Returns = field(default_factory=Returns)
    """Of policies, what they got so far."""
    _after: int = 0
    _events_after: int = 0
    _losses: dict[str, float] = field(default_factory=dict)
    _shares: dict[int, list[float]] = field(default_factory=dict)
    """Step -> sum of losses and tokens that members evaluated there, each a share of the text."""
    _progress: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=200))

    def refresh(self, client: HubClient) -> None:
        """Ask the hub again."""
        self.view = client.job(self.job)
        answer = client.metrics(self.job, after=self._after)
        self._after = int(answer["last"])
        for point in answer["points"]:
            self._take(point)
        news = client.events(self.job, after=self._events_after)
        self._events_after = int(news["last"])
        self.events = news["events"]
        now = time.monotonic()
        if not self._progress or self.step != self._progress[-1][1]:
            self._progress.append((now, self.step))

    def await_news(self, client: HubClient, *, timeout_s: float) -> None:
        """Wait until the hub has something new to tell of the job, e.g. its end, or time is up."""
        client.events(self.job, after=self._events_after, wait_s=timeout_s)

    def _take(self, point: dict[str, Any]) -> None:
        values = point["values"]
        self.returns.take(point)
        if "loss" in values:
            self._losses[point["member"]] = values["loss"]
            self.loss = sum(self._losses.values()) / len(self._losses)
        if values.get("held_out_tokens"):
            both = self._shares.setdefault(int(point["step"]), [0.0, 0.0])
            both[0] += values["held_out_loss_sum"]
            both[1] += values["held_out_tokens"]
            self.held_out = both[0] / both[1]
        if "held_out_loss" in values:
            self.held_out = values["held_out_loss"]
        if "parameters" in values:
            self.parameters = int(values["parameters"])

    @property
    def state(self) -> str:
        """Waiting, running, done, failed or stopped."""
        return str(self.view.get("state", JobState.WAITING))

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state in ENDED

    @property
    def members(self) -> list[dict[str, Any]]:
        """The members in slot order."""
        return sorted(self.view.get("members", []), key=lambda member: member["slot"])

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The members, each with the further machines of its island behind it."""
        followers = self.view.get("followers", [])
        return [
            process
            for member in self.members
            for process in [member, *(h for h in followers if h["follower_of"] == member["member"])]
        ]

    @property
    def step(self) -> int:
        """Steps that the members have done, the slowest of those that take part.

        Of policies, their share of all environment steps, in steps of the job.
        """
        if self.view.get("kind") == "rl":
            return int((self.view.get("progress") or {}).get("step") or 0)
        alive = [
            m for m in self.members if m["state"] not in (MemberState.LOST, MemberState.FAILED)
        ] or self.members
        # A newcomer begins at nothing and then stands where the others do.
        alive = [m for m in alive if m.get("standing") not in BEHIND] or alive
        return min((int(m.get("step") or 0) for m in alive), default=0)

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return int((self.view.get("progress") or {}).get("steps") or 0)

    @property
    def tokens_per_s(self) -> float:
        """Speed of all members together; when the job has ended, what it was at last."""
        counted = [m for m in self.members if self.ended or is_live(m)]
        return sum(float(m.get("tokens_per_s") or 0.0) for m in counted)

    @property
    def sent_bytes(self) -> int:
        """What the member that sent most has sent."""
        return max((traffic(m, "sent_bytes") for m in self.members), default=0)

    @property
    def data_parallel_bytes(self) -> int:
        """What a per-step fp32 ring all-reduce of the same steps would have sent per node."""
        members = len(self.members)
        if members < 2:
            return 0
        return round(2 * (members - 1) / members * 4 * self.parameters * self.step)

    def left_s(self) -> float | None:
        """Return the estimated time until the last step, or None before there is a speed."""
        recent = [p for p in self._progress if p[0] >= self._progress[-1][0] - RATE_WINDOW_S]
        if len(recent) < 2 or not self.steps:
            return None
        (start, first), (end, last) = recent[0], recent[-1]
        if end <= start or last <= first:
            return None
        rest = (self.steps - last) * (end - start) / (last - first)
        return max(0.0, rest - (time.monotonic() - end))


def traffic(member: dict[str, Any], name: str) -> int:
    """Return a member's `sent_bytes` or `received_bytes`; what it last reported once it is gone."""
    reported = (member.get("values") or {}).get(name) or 0
    return max(int(member.get(name) or 0), int(reported))


BEHIND = ("expected", "launched", "recovering", "away")
"""What rounds call members that do not stand on the committed state, or are not heard."""


def shown_state(member: dict[str, Any]) -> str:
    """Return what a member does, in a word or two: rounds know more than its process tells."""
    state = str(member["state"])
    if state != JobState.RUNNING:
        return state
    standing, pace = member.get("standing"), float(member.get("pace") or 1.0)
    if standing in ("recovering", "away"):
        return "recovering" if standing == "recovering" else "silent"
    return state if pace >= 1.0 else f"{state}, {pace:.0%} of the steps"


def shown_job_state(view: dict[str, Any]) -> str:
    """Return the state of a job; a running one may be paused for want of members."""
    state = str(view.get("state", JobState.WAITING))
    return "paused" if state == JobState.RUNNING and view.get("paused") else state


def is_live(member: dict[str, Any]) -> bool:
    """Return whether a member is at work."""
    return MemberState(member["state"]).live
