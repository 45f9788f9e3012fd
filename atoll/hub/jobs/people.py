"""What people see of a job: its machines by name, how many it needs, why it stands still."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.hub.jobs.record import Job, Member
from atoll.ids import by_number, machine_names
from atoll.wire.states import JobState, MemberState

LISTED = 3
"""Names in a sentence; of more, the first ones and the number of the others."""


def name_of(job: Job, process: Member) -> str:
    """Return a process by its machine's name; several of one machine are distinguished."""
    return machine_names({one.member: one.node for one in job.processes})[process.member]


def describe_nodes(job: Job) -> str:
    """Return how many places a job needs."""
    if job.machines == 1:
        return "1 node" if job.nodes_wanted == 1 else f"{job.nodes_wanted} nodes"
    return f"{job.nodes_wanted * job.machines} nodes, {job.machines} for each member"


def standstill(job: Job) -> str:
    """Return why a job makes no progress although it runs; empty: it does."""
    waiting = sorted(m for m in job.without_room if (p := job.members.get(m)) and p.live)
    if job.trouble or job.paused or not waiting:
        return job.trouble or job.paused
    names = ", ".join(name_of(job, job.members[member]) for member in waiting)
    return (
        f"no room is left on the hub's disk for what {names} trained: free some space there; "
        "it is kept, and stored then"
    )


def few(names: Sequence[str]) -> str:
    """Return names for people; of many only the first."""
    if len(names) <= LISTED:
        return ", ".join(names)
    return f"{', '.join(names[: LISTED - 1])} and {len(names) - LISTED + 1} more"


def starting(job: Job) -> str:
    """Return which machines of a running job are not at work yet, and why; empty: all are."""
    if job.state != JobState.RUNNING or job.stopping:
        return ""
    names = machine_names({one.member: one.node for one in job.processes})
    by_state: dict[MemberState, list[str]] = {}
    for one in job.processes:
        by_state.setdefault(one.state, []).append(names[one.member])
    parts = []
    for state, why in (
        (MemberState.ASSIGNED, "its machine has not answered yet"),
        (MemberState.STARTING, _preparing(job)),
    ):
        if found := sorted(by_state.get(state, ()), key=by_number):
            parts.append(f"waiting for {few(found)} to start: {why}")
    return "; ".join(parts)


def _preparing(job: Job) -> str:
    """Return what a node does between the order to start and the process's first message."""
    spec = job.spec.job
    program = job.silent or job.kind == "script"
    steps = [
        "fetching its code" if spec.code else "",
        "installing its packages" if spec.requirements else "",
        f"starting the {job.kind}" if program else "loading torch, the model and the data",
    ]
    return ", ".join(filter(None, steps))
