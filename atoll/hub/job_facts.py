"""What people are told of a job beside its training: where it is placed, and how it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from atoll.config import JobSpec
from atoll.config.rl_seats import ACTOR, seats
from atoll.hub.job_record import LIVE_STATES, Job, Member

LINES_TOLD = 20
"""Last lines of a failed process in the view of its job; all that are kept are in the member's."""


def job_facts(job: Job) -> dict[str, Any]:
    """Return what placement knows of a job, and the process that failed, if one did."""
    members = sorted(job.members.values(), key=lambda member: member.slot)
    processes = sorted(job.processes, key=lambda process: process.slot)  # stable: hands come after
    live = [process for process in processes if process.state in LIVE_STATES]
    failed = culprit(job)
    return {
        "kind": job.kind,
        "seats": job.seats,
        "island": job.island,
        "inner": job.inner,
        "priority": job.priority,
        "retries": job.retries,
        "retried": sum(member.retried for member in members),
        "batch": job.batch,
        "places": list(dict.fromkeys(process.node for process in live or processes)),
        "failed_member": failed.member if failed else "",
        "failed_node": failed.node if failed else "",
        "exit_code": failed.exit_code if failed else None,
        "last_lines": failed.tail[-LINES_TOLD:] if failed else [],
        "error": _whole_error(job, failed),
    }


def steps_of(spec: JobSpec) -> int:
    """Return how many steps a job has: 0 where nobody knows; of policies the most of one."""
    if spec.kind == "rl":
        return max((seat.steps for seat in seats(spec.rl)), default=0)
    return 0 if spec.job.command else spec.train.steps


def seats_told(spec: JobSpec) -> list[dict[str, Any]]:
    """Return what each slot of a job does, where that is not the same."""
    return [dataclasses.asdict(seat) for seat in seats(spec.rl)] if spec.kind == "rl" else []


def island_told(spec: JobSpec) -> str:
    """Return how each member lies over its processes; empty where it is one process."""
    if spec.mesh.ranks == 1:
        return ""
    machines = spec.island.machines
    return f"{spec.mesh} on {machines} machines" if machines > 1 else str(spec.mesh)


def inner_told(spec: JobSpec) -> str:
    """Return how each member computes its steps; empty where one process does it plainly."""
    ranks, train = spec.mesh.ranks, spec.train
    words = [spec.strategy.inner or "local"] if not spec.job.script or spec.strategy.inner else []
    if ranks > 1:
        words.append(f"{ranks} ranks")
    if not (spec.job.script or spec.job.command or spec.kind == "rl"):  # those have their own
        words.append(train.precision)
        words += [f"recompute {train.recompute}"] if train.recompute != "none" else []
    plain = ranks == 1 and (train.precision, train.recompute) == ("fp32", "none")
    return "" if plain or spec.job.command or spec.kind == "rl" else ", ".join(words)


def nodes_told(job: Job) -> str:
    """Return how many places a job wants, for people."""
    if job.machines == 1:
        return f"{job.nodes_wanted} nodes"
    return f"{job.nodes_wanted * job.machines} nodes, {job.machines} for each member"


def policy_steps(job: Job, steps: Mapping[int, int]) -> int:
    """Return how far the policies of a job are, all together: a share of `job.steps`.

    Args:
        job: A job whose members have different things to do.
        steps: Slot -> steps of that member so far.
    """
    done: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for slot, seat in enumerate(job.seats):
        if seat["role"] == ACTOR:
            name = str(seat["policy"])
            done[name] = done.get(name, 0) + steps.get(slot, 0)
            wanted[name] = int(seat["steps"])
    total = sum(wanted.values())
    counted = sum(min(count, wanted[name]) for name, count in done.items())
    return job.steps * counted // total if total else 0


def _whole_error(job: Job, failed: Member | None) -> dict[str, Any] | None:
    """Return the error of a job with where it happened, the exit status and the last lines."""
    if job.error is None or failed is None:
        return job.error
    return {
        **job.error,
        "member": failed.member,
        "node": failed.node,
        "exit_code": failed.exit_code,
        "last_lines": failed.tail[-LINES_TOLD:],
    }


def culprit(job: Job) -> Member | None:
    """Return the process whose failure ended a job, or that failed last while it goes on."""
    failed = [process for process in job.processes if process.state == "failed"]
    if job.error is not None:
        hands_first = [*job.hands.values(), *job.members.values()]  # which end their members
        same = [process for process in hands_first if process.error == job.error]
        failed = same or failed
    return failed[0] if failed else None
