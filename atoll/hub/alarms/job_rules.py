"""Alarm rules on whole jobs and on queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atoll.errors import ScriptError
from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Facts, JobFacts
from atoll.hub.jobs.record import whole_remedy
from atoll.hub.quotas.ledger import Use
from atoll.hub.quotas.limits import Kind
from atoll.wire.states import JobState, MemberState

FAILED_FOR_S = 86_400.0
FULL = 0.95


def job_failed(facts: Facts) -> Iterator[Finding]:
    """Find failed jobs; names the member that failed first, if any."""
    for job in facts.jobs:
        if job.state != JobState.FAILED or facts.now - (job.ended or facts.now) > FAILED_FOR_S:
            continue
        failed = [m for m in job.members.values() if m.state == MemberState.FAILED and m.error]
        member = failed[0].member if failed else ""
        error = job.error or (failed[0].error if failed else None) or {}
        # A failure of the user's own script says nothing about the node.
        own = error.get("kind") == ScriptError.__name__
        remedy = whole_remedy(job.job, error.get("remedy") or "")
        what = error.get("what") or job.reason or "it failed"
        given = error.get("given") or ""
        shown = f" ({given})" if given and given != member and given not in what else ""
        location = f", on {job.who(member)}" if member and job.node_of(member) else ""
        yield Finding(
            kind="job-failed",
            severity="warning" if own else "critical",
            job=job.job,
            member=member,
            node="" if own else job.node_of(member),
            cause=f"{job.job} failed: {what}{shown}{location}",
            remedy=(remedy or f"see its last lines: atoll logs {job.job}")
            + ("" if "resume" in remedy else f"; once that is mended: atoll resume {job.job}"),
        )


def limit_reached(facts: Facts) -> Iterator[Finding]:
    """Find sessions above the limit on frames, and other quotas that are used up."""
    jobs = {job.job: job for job in facts.jobs}
    for one in facts.hub.limited:
        job, _, member = one.address.rpartition("/")
        node = jobs[job].node_of(member) if job in jobs else ""
        where = f" on {node}" if node else ""
        yield Finding(
            kind="limit-reached",
            key=one.address,
            job=job if job in jobs else "",
            member=member if job else "",
            node=node if job else one.address,
            value=one.paused_s,
            cause=f"{one.address}{where} sends more than the {one.frames_per_s:,.0f} frames a "
            f"second that one process may: {one.frames:,} so far, made to wait {one.paused_s:.0f} "
            "s",
            remedy="put several items or lines into one message; if you do not know why it does "
            "that, stop its job (atoll stop) or revoke its machine (atoll node revoke)",
        )
    for use in facts.hub.reached:
        if use.kind is not Kind.FRAMES:
            yield _quota_reached(use, jobs)


def _quota_reached(use: Use, jobs: Mapping[str, JobFacts]) -> Finding:
    holder = use.holder
    job = holder.name if holder.role == "job" else ""
    node = holder.name if holder.role == "node" else ""
    if job in jobs:
        node = jobs[job].node_of(holder.member)
    where = f" on {node}" if node and holder.role != "node" else ""
    used, limit = use.figures
    times = "once" if use.refused == 1 else f"{use.refused} times"
    refused = f", refused {times}" if use.refused else ""
    return Finding(
        kind="limit-reached",
        key=f"{use.kind} {holder.text}",
        job=job,
        member=holder.member,
        node=node,
        value=use.used / use.limit if use.limit else 0.0,
        cause=f"{holder.text}{where} has reached a limit of this hub: {use.kind.text}: {used} of "
        f"{limit}{refused}",
        remedy=f"{_REMEDIES[use.kind]}; or raise {use.kind.value} in quotas.toml and restart the "
        "hub; see `atoll limits`",
    )


_REMEDIES = {
    Kind.JOB_DISK: "fewer checkpoints (`keep` in [checkpoint]) or artifacts; or `atoll rm` it",
    Kind.DISK: "delete jobs that are not needed: `atoll rm JOB`",
    Kind.QUEUE: "more consumers; discard dead letters: `atoll queue dead QUEUE`",
    Kind.JOB_QUEUES: "more consumers; discard dead letters: `atoll queue dead QUEUE`",
    Kind.BLOBS: "consume its queue items or delete its jobs: blobs without references go after an "
    "hour",
    Kind.BLOB_BYTES: "consume its queue items or delete its jobs: blobs without references go "
    "after an hour",
    Kind.REQUESTS: "put several items into one message; look which processes use its token, and if "
    "you do not know them, revoke it",
    Kind.CONNECTIONS: "look which processes use its token; if you do not know them, revoke it",
    Kind.REDUCER_MEMBER: "a codec with fewer bytes; or look what this member sends",
    Kind.REDUCER_JOB: "a codec with fewer bytes, or fewer members",
}


def queue_full(facts: Facts) -> Iterator[Finding]:
    """Find queues that are full or have dead letters."""
    for queue in facts.hub.queues:
        if queue.fill >= FULL or queue.waiting:
            waiting = f", {queue.waiting} producers wait" if queue.waiting else ""
            yield Finding(
                kind="queue-full",
                key=queue.queue,
                value=queue.fill,
                cause=f"queue {queue.queue} is full: {queue.ready} items, "
                f"{queue.fill:.0%} of its bound{waiting}",
                remedy="start more consumers, or raise its bound; see its consumers: "
                "atoll queue list",
            )
        if queue.dead:
            yield Finding(
                kind="queue-full",
                key=f"{queue.queue} dead",
                value=float(queue.dead),
                cause=f"queue {queue.queue} has {queue.dead} dead letters: items that were "
                "released too often",
                remedy=f"inspect, requeue or discard them: atoll queue dead {queue.queue}",
            )
