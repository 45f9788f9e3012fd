"""Progress, durations and remaining time of a job: computed here once, for page and terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.config.rl_roles import ACTOR, member_roles
from atoll.hub.jobs.record import Job, policy_steps, steps_of
from atoll.hub.jobs.times import training_s, wall_s
from atoll.hub.observability.latest import Latest
from atoll.wire.states import JobState, MemberState

LEAST_FRACTION = 0.02
"""Below this fraction no remaining time is estimated from the average speed."""

Recent = Sequence[tuple[float, int]]


def progress_of(
    job: Job, latest: Mapping[str, Latest], *, swarm: Mapping[str, Any] | None, now: float
) -> dict[str, Any]:
    """Return step, steps (0: no total is known), fraction, round, durations and time left.

    `training_s` and `wall_s` are those of :mod:`atoll.hub.jobs.times`; `left_s` is training time,
    None if unknown.
    """
    steps, step = steps_of(job.spec), _step(job, latest, swarm)
    done = job.state == JobState.DONE
    fraction = 1.0 if done else min(1.0, step / steps) if steps else 0.0
    trained_s = training_s(job, now)
    return {
        "step": step,
        "steps": steps,
        "fraction": fraction,
        "round": job.committed_round,
        "training_s": trained_s,
        "wall_s": wall_s(job, now),
        "left_s": _left_s(job, latest, step=step, trained_s=trained_s or 0.0),
    }


def _step(job: Job, latest: Mapping[str, Latest], swarm: Mapping[str, Any] | None) -> int:
    """Return the steps done; of policies, their share of all steps; of a SWARM, of all stages."""
    if swarm is not None:
        return int(swarm["step"])
    known = {m.slot: latest[m.member].step for m in job.members.values() if m.member in latest}
    return policy_steps(job, known) if job.of_policies else max(known.values(), default=0)


def _left_s(job: Job, latest: Mapping[str, Latest], *, step: int, trained_s: float) -> float | None:
    """Return the time left: by the newest points, else by the average of the whole run."""
    steps = steps_of(job.spec)
    if job.state != JobState.RUNNING or job.paused or not steps:
        return None
    running = [m for m in job.members.values() if m.state == MemberState.RUNNING]
    if job.of_policies:
        return _left_of_policies(job, latest)
    speeds = (_speed(latest[m.member].recent) for m in running if m.member in latest)
    speed = max((one for one in speeds if one is not None), default=None)
    if speed:
        return max(0.0, (steps - step) / speed)
    fraction = step / steps
    return trained_s * (1 - fraction) / fraction if fraction > LEAST_FRACTION else None


def _speed(recent: Iterable[tuple[float, int]]) -> float | None:
    """Return the steps per second between the oldest and newest recent point."""
    points = list(recent)
    forward = [at for at in range(1, len(points)) if points[at][1] < points[at - 1][1]]
    points = points[forward[-1] :] if forward else points  # it went back to a checkpoint
    if len(points) < 2:
        return None
    (start, first), (end, last) = points[0], points[-1]
    return (last - first) / (end - start) if end > start and last > first else None


def _left_of_policies(job: Job, latest: Mapping[str, Latest]) -> float | None:
    """Return the time until the last policy has done its steps."""
    done: dict[str, float] = {}
    speed: dict[str, float] = {}
    wanted: dict[str, int] = {}
    slots = {m.slot: m for m in job.members.values()}
    for slot, role in enumerate(member_roles(job.spec.rl)):
        if role.role != ACTOR:
            continue
        wanted[role.policy] = role.steps
        member = slots.get(slot)
        values = latest[member.member].values if member and member.member in latest else {}
        done[role.policy] = done.get(role.policy, 0.0) + values.get("env_steps", 0.0)
        if member and member.state == MemberState.RUNNING:
            rate = values.get("env_steps_per_s", 0.0)
            speed[role.policy] = speed.get(role.policy, 0.0) + rate
    rest = {name: steps - done[name] for name, steps in wanted.items() if done[name] < steps}
    if any(not speed.get(name) for name in rest):
        return None
    return max((left / speed[name] for name, left in rest.items()), default=0.0)
