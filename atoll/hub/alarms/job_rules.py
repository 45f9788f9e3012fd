"""Alarm rules on whole jobs and on queues."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.hub.alarms.engine import Finding
from atoll.hub.alarms.facts import Facts
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
        what = error.get("what") or job.reason or "it failed"
        given = f" ({error['given']})" if error.get("given") else ""
        whose = f", first on {job.who(member)}" if member else ""
        yield Finding(
            kind="job-failed",
            severity="critical",
            job=job.job,
            member=member,
            node=job.node_of(member),
            cause=f"{job.job} failed: {what}{given}{whose}",
            remedy=(error.get("remedy") or f"read its last lines: atoll logs {job.job}")
            + f"; then resume from its last checkpoint: atoll resume {job.job}",
        )


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
