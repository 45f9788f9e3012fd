"""State of a running job, collected from the hub's answers, including reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.config.rl_roles import CRITICS
from atoll.net.http.client import HubClient
from atoll.wire.states import JobState, MemberState, RoundMemberState

MAX_RETURNS = 512
"""Values kept per member; longer series are thinned by dropping every second value."""

CRITIC_AWAY_S = 8.0
"""An actor without messages from the critic for this long is marked; it uses the last critic."""


@dataclass(slots=True)
class Returns:
    """The returns of every member in order of measurement."""

    by_member: dict[str, list[float]] = field(default_factory=dict)

    def take(self, point: Mapping[str, Any]) -> None:
        """Add the return of a measurement, if it has one."""
        value = point["values"].get("return")
        if value is None:
            return
        row = self.by_member.setdefault(str(point["member"]), [])
        row.append(float(value))
        if len(row) > MAX_RETURNS:
            del row[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNow:
    """Current state of one policy, over all its actors."""

    policy: str
    env: str
    steps: int
    """Environment steps to do."""
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
        """Environment steps per second of the active actors."""
        return self._sum("env_steps_per_s", live=True)

    @property
    def queue_wait_s(self) -> float:
        """Seconds its actors have waited for space in their queues."""
        return self._sum("queue_wait_s")

    @property
    def value_version(self) -> int:
        """The newest critic version that an actor has."""
        return int(max((value(m, "value_version") or 0.0 for m in self.members), default=0.0))

    @property
    def best(self) -> float | None:
        """The best mean return so far."""
        reported = [value(member, "return_best") for member in self.members]
        known = [one for one in reported if one is not None]
        return max(known) if known else max(self.returns, default=None)

    @property
    def now(self) -> float | None:
        """The mean return of the last episodes."""
        reported = [value(member, "return") for member in self.members]
        known = [one for one in reported if one is not None]
        return sum(known) / len(known) if known else None

    @property
    def critic_away_s(self) -> float:
        """Seconds since the critic answered, if long enough to show; else 0."""
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
    roles: Sequence[Mapping[str, Any]], members: Sequence[dict[str, Any]], returns: Returns
) -> list[PolicyNow]:
    """Return the policies in the order of the job file.

    Args:
        roles: Role of each slot, from the hub.
        members: The job's members, from the hub.
        returns: Measurements so far.
    """
    by_slot = {member["slot"]: member for member in members}
    found: dict[str, PolicyNow] = {}
    for slot, role in enumerate(roles):
        if role["role"] != "actor":
            continue
        name, member = str(role["policy"]), by_slot.get(slot)
        known = found.setdefault(
            name,
            PolicyNow(
                policy=name, env=str(role["env"]), steps=int(role["steps"]), members=[], returns=[]
            ),
        )
        if member is not None:
            known.members.append(member)
            if not known.returns:
                known.returns.extend(returns.by_member.get(str(member["member"]), ()))
    return list(found.values())


def critic_of(
    roles: Sequence[Mapping[str, Any]], members: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the member that is the critic, or the learner; None where there is none."""
    slots = [slot for slot, role in enumerate(roles) if role["role"] in CRITICS]
    return next((member for member in members if member["slot"] in slots), None)


def share_done(policies: Sequence[PolicyNow]) -> float:
    """Return the share of all policies' environment steps that is done."""
    wanted = sum(policy.steps for policy in policies)
    done = sum(min(policy.env_steps, policy.steps) for policy in policies)
    return done / wanted if wanted else 0.0


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw numbers as a row of bars, scaled from lowest to highest."""
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
"""Final states of a job."""


@dataclass(slots=True)
class Watched:
    """A job's state at the last refresh."""

    job: str
    view: dict[str, Any] = field(default_factory=dict)
    """The hub's JobView."""
    loss: float | None = None
    """Mean of the members' last training losses."""
    held_out: float | None = None
    """Last loss on held-out text."""
    parameters: int = 0
    """The model's number of parameters, once a member has reported it."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """New events of the last refresh."""
    returns: Returns = field(default_factory=Returns)
    """Returns of policies so far."""
    _after: int = 0
    _events_after: int = 0
    _losses: dict[str, float] = field(default_factory=dict)
    _shares: dict[int, list[float]] = field(default_factory=dict)
    """Step -> sum of losses and tokens that members evaluated there."""

    @classmethod
    def of(cls, view: dict[str, Any]) -> Watched:
        """Return what one answer of the hub says, without history."""
        values = [member.get("values") or {} for member in view.get("members", [])]
        parameters = max((int(one.get("parameters") or 0) for one in values), default=0)
        return cls(
            str(view["job"]), view=view, loss=view.get("loss"),
            held_out=view.get("held_out_loss"), parameters=parameters,
        )  # fmt: skip

    def refresh(self, client: HubClient) -> None:
        """Query the hub again."""
        self.view = client.job(self.job)
        answer = client.metrics(self.job, after=self._after)
        self._after = int(answer["last"])
        for point in answer["points"]:
            self._take(point)
        news = client.events(self.job, after=self._events_after)
        self._events_after = int(news["last"])
        self.events = news["events"]

    def await_news(self, client: HubClient, *, timeout_s: float) -> None:
        """Wait until the hub has news of the job, or time is up."""
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
    def nodes(self) -> dict[str, str]:
        """The machine of each process."""
        return nodes_of(self.view)

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The members, each followed by the further machines of its island."""
        followers = self.view.get("followers", [])
        return [
            process
            for member in self.members
            for process in [member, *(h for h in followers if h["follower_of"] == member["member"])]
        ]

    @property
    def step(self) -> int:
        """Steps done, as the hub counts them."""
        return int((self.view.get("progress") or {}).get("step") or 0)

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return int((self.view.get("progress") or {}).get("steps") or 0)

    @property
    def share(self) -> float | None:
        """Share of the job that is done; None: nothing says how much there is to do."""
        if self.state == JobState.DONE:
            return 1.0
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def tokens_per_s(self) -> float:
        """Speed of the members at work together; the last known one after the end."""
        counted = [m for m in self.members if self.ended or m["state"] == MemberState.RUNNING]
        return sum(float(m.get("tokens_per_s") or 0.0) for m in counted)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a member sent, on average."""
        sent = [traffic(member, "sent_bytes") for member in self.members]
        return round(sum(sent) / len(sent)) if sent else 0

    @property
    def data_parallel_bytes(self) -> int:
        """What a per-step fp32 ring all-reduce of the same steps would have sent per node."""
        members = len(self.members)
        if members < 2:
            return 0
        return round(2 * (members - 1) / members * 4 * self.parameters * self.step)

    @property
    def left_s(self) -> float | None:
        """Time until the last step, as the hub estimates it; None: unknown."""
        left = (self.view.get("progress") or {}).get("left_s")
        return None if left is None else float(left)

    @property
    def training_s(self) -> float | None:
        """Time that it has trained: without pauses, and without the time before a resume."""
        spent = (self.view.get("progress") or {}).get("training_s")
        return None if spent is None else float(spent)


def nodes_of(view: Mapping[str, Any]) -> dict[str, str]:
    """Return the machine of each process of a job, from the hub's view."""
    processes = [*view.get("members", []), *view.get("followers", [])]
    return {str(one["member"]): str(one["node"]) for one in processes}


def traffic(member: dict[str, Any], name: str) -> int:
    """Return a member's `sent_bytes` or `received_bytes`, as the hub counts them."""
    return int(member.get(name) or 0)


def shown_state(member: dict[str, Any]) -> str:
    """Return a member's state in a word or two, from rounds and process."""
    state = str(member["state"])
    if state != JobState.RUNNING:
        return state
    pace = float(member.get("pace") or 1.0)
    match member.get("round_state"):
        case RoundMemberState.RECOVERING:
            return "recovering"
        case RoundMemberState.AWAY:
            return "silent"
    return state if pace >= 1.0 else f"{state}, {pace:.0%} pace"


def shown_job_state(view: dict[str, Any]) -> str:
    """Return a job's state; a running one may be paused for lack of members."""
    state = str(view.get("state", JobState.WAITING))
    return "paused" if state == JobState.RUNNING and view.get("paused") else state


def why_not_yet(view: dict[str, Any]) -> str:
    """Return why a job waits, is paused or has not begun on all its machines, or how it ended."""
    return str(view.get("reason") or view.get("paused_reason") or view.get("starting") or "")
