"""What people are told of a job: its machines by name, how many it needs, why it stands still."""

from __future__ import annotations

from atoll.hub.jobs.record import Job, Member
from atoll.ids import machine_names


def name_of(job: Job, process: Member) -> str:
    """Return a process by its machine's name; several of one machine are told apart."""
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
