"""Opens the rounds of a job: afresh, or where an earlier life of the hub left them."""

from __future__ import annotations

from atoll.config import parse_spec
from atoll.hub.decisions import JobRounds
from atoll.hub.jobs import LIVE_STATES, Job
from atoll.hub.leases import Leases
from atoll.hub.progress import Progress
from atoll.hub.room import KEPT_VERDICTS, Room
from atoll.hub.round_book import RoundBook
from atoll.wire.messages import RoundPlan, Verdict

Rows = list[tuple[RoundPlan, Verdict | None]]


async def open_room(
    job: Job, *, book: RoundBook, now: float, fresh: bool, first_grace_s: float
) -> Room:
    """Return the rounds of a job.

    Args:
        job: Its record.
        book: Where plans and verdicts are kept.
        now: Present time.
        fresh: It starts now; attempts without a verdict are aborted. Else they are taken up.
        first_grace_s: How long the first round waits for members that are still starting.
    """
    if fresh:
        await book.abandon(job.job)
    rows = await book.newest(job.job, limit=KEPT_VERDICTS)
    spec = parse_spec(job.spec)
    machine = JobRounds(
        job.job,
        nodes_wanted=job.nodes_wanted - len(job.aside),
        min_nodes=max(0, job.min_nodes - len(job.aside)),
        aside=job.aside,
        preference=spec.job.route,
        committed_round=job.committed_round,
        start_round=job.start_round,
        epoch=rows[0][0].epoch if rows else 0,
        first_grace_s=first_grace_s,
        starting=fresh or not rows,
        unproved=not fresh,
        stopping=job.stopping,
        paused=job.paused,
        progress=Progress(
            job.measures,
            Leases(job.slots, dict(job.leases)),
            paced=spec.train.pace == "measured",
        ),
    )
    room = Room(machine, now)
    room.verdicts = {plan.epoch: verdict for plan, verdict in rows if verdict is not None}
    room.decided.set()
    _enrol(machine, job, fresh=fresh)
    if fresh and job.leases:
        machine.progress.leases.renew(machine.roll.standing)
    if not fresh:
        _recall(machine, rows)
        await _reopen(room, rows, book, now)
    return room


def _enrol(machine: JobRounds, job: Job, *, fresh: bool) -> None:
    """Take over from the record who lives, and where each can be dialled."""
    for member in job.members.values():
        name, roll = member.member, machine.roll
        if name in machine.aside:
            continue
        machine.dials[name] = member.dial
        if member.state in LIVE_STATES:
            machine.expect(name)
            if member.leaving:
                roll.leaving.add(name)
            if member.incarnation and not fresh:
                roll.standing[name] = "live"
        elif member.state == "lost" and not fresh:
            roll.standing[name] = "gone"  # it may come back yet
        if job.outsiders.get(name) == member.attempt and not fresh:
            roll.outsiders.add(name)


def _recall(machine: JobRounds, rows: Rows) -> None:
    """Take over from the record who stands on the committed state, and holds which data.

    Without a verdict on it (it was adopted, or the run was set back) everybody may.
    """
    committed = [(plan, v) for plan, v in rows if v is not None and v.committed]
    if committed and committed[0][1].round + 1 == machine.committed_round:
        plan, verdict = committed[0]
        machine.roll.recorded = set(plan.members) & set(verdict.contributors)
        held = {m: lease.slot for m, lease in verdict.leases.items()}
        machine.progress.leases.held = held
    else:
        there = {m for m, s in machine.roll.standing.items() if s in ("live", "gone")}
        machine.roll.recorded = there - machine.roll.outsiders


async def _reopen(room: Room, rows: Rows, book: RoundBook, now: float) -> None:
    """Take up the attempt that was open."""
    if not rows or rows[0][1] is not None:
        return
    machine, plan = room.machine, rows[0][0]
    if plan.round < machine.committed_round:  # decided, but neither stored nor told
        machine.committed_round = plan.round
        cursors = await book.cursors_at(machine.job, plan.round)
        await book.set_round(machine.job, plan.round, cursors)
        machine.progress.set_back(cursors)
    machine.reopen(plan, now, await book.joins_of(plan))
    room.decided.clear()
