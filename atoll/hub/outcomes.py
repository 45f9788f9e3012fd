"""When a process that failed is not started again, and when and how a job has ended. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atoll.hub.jobs import LIVE_STATES, Job, Member
from atoll.hub.relaunch import MAX_FAILURES, failures_after
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED

FATAL_KINDS = frozenset({"ConfigError", "DataError", "LossNotFinite", "CheckpointCorrupt"})
"""Errors of the job itself that another try cannot cure: the first of them ends the job."""

PROGRAM_KINDS = frozenset({"ScriptError", "OutOfMemory", "NotAllowed"})
"""Errors of the program: it is tried again as often as the job says.

A process that was killed, whose machine went away or that lost the hub is none of these."""

OF_ITS_MACHINE = frozenset({"OutOfMemory", "NotAllowed"})
"""Those of them that another machine may not meet."""

ENDED_BY_SIGNAL = frozenset({-1, -2, -9, -15, 129, 130, 137, 143})
"""Exit statuses of a process that somebody else ended, directly or in a container."""

End = tuple[str, str, dict[str, str] | None]
"""State, reason and error of a job that has ended."""


def program_failed(member: Member, *, trainer: bool) -> bool:
    """Return whether a process came to its end by a fault of its own program.

    Args:
        member: Its record.
        trainer: It is the built-in trainer, whose bare exits are the machine's fault.
    """
    if member.state != "failed":
        return False
    kind = (member.error or {}).get("kind", "")
    if kind in PROGRAM_KINDS:
        return True
    if trainer or kind not in ("", "JobError") or member.exit_code is None:
        return False
    return member.exit_code != 0 and member.exit_code not in ENDED_BY_SIGNAL


def spent(member: Member, job: Job) -> bool:
    """Return whether a program has failed more often than its job allows."""
    return program_failed(member, trainer=job.kind == "trainer") and member.retried >= job.retries


def given_up(member: Member, job: Job) -> bool:
    """Return whether a member that does not live is not launched again."""
    if member.state in LIVE_STATES:
        return False
    if job.of_policies and (member.error or {}).get("kind", "") in FATAL_KINDS:
        return True
    return failures_after(member) >= MAX_FAILURES or spent(member, job)


def outcome(job: Job, *, working: Collection[str] | None = None) -> End | None:
    """Return how a job has ended, or None while it goes on.

    Args:
        job: Its record.
        working: Members that stand on the state of the group; the others that live are on their
            way to it and do not keep a job alive whose work is done. None: all that live.
    """
    members = {n: m for n, m in job.members.items() if m.slot < job.nodes_wanted}
    for member in members.values():
        if _ends_the_job(member, job):
            reason = f"{member.member}: {(member.error or {}).get('what', 'it failed')}"
            return "failed", reason, member.error
    live = [member.member for member in members.values() if member.state in LIVE_STATES]
    done = _is_done(members, job)
    if any(working is None or member in working for member in live) or (live and not done):
        return None
    if job.stopping:
        return "stopped", "a stop was asked for", None
    if done:
        return "done", "", None
    if not members or not all(given_up(member, job) for member in members.values()):
        return None
    errors = [member.error for member in members.values() if member.error]
    return "failed", "every member was lost", errors[0] if errors else None


def _is_done(members: Mapping[str, Member], job: Job) -> bool:
    """Return whether the work is done: one tells for all that train together, else each for itself.

    One that ends early, before others were even started, does not speak for them.
    """
    done = sum(member.state == "done" for member in members.values())
    if not job.separate:
        return done > 0
    return done > 0 and done == len(members) and done >= (job.min_nodes or job.nodes_wanted)


def _ends_the_job(member: Member, job: Job) -> bool:
    """Return whether the failure of one member is the failure of all.

    A group goes on without a machine that has too little memory, or whose owner refuses it.
    """
    kind = (member.error or {}).get("kind", "")
    if kind in FATAL_KINDS:
        return True
    together = not job.separate and job.nodes_wanted > 1
    return spent(member, job) and not (together and kind in OF_ITS_MACHINE)


def end_state(record: Member, exit_code: int | None, *, stopping: bool) -> str:
    """Return the state of a member whose process has ended."""
    if exit_code == 0:
        return "done"
    if stopping:
        return "stopped"
    if exit_code == EXIT_REPLACED:
        return "lost"
    return "left" if exit_code == EXIT_LEFT or record.leaving else "failed"
