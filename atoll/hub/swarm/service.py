"""Hosts the ledgers of SWARM jobs: answers members when there is news.

Nothing is written to disk. A ledger begins with the first announcement that this hub process gets
of a job, and takes over what members report until all live ones are back or `RETURN_S` has passed.
The start of a job is no special case: its members have nothing to report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from atoll.clock import Clock
from atoll.config import JobSpec
from atoll.errors import HubError
from atoll.hub.jobs.jobs import Job, Jobs
from atoll.hub.long_polls import LongPolls
from atoll.hub.observability.events import Events
from atoll.hub.observability.metrics import Metrics
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.groups import Meeting, Runtimes
from atoll.hub.swarm.held_out import HeldOutStore
from atoll.hub.swarm.view import MoveView, SwarmView, view_of_swarm
from atoll.hub.swarm.whole import WholeMembers
from atoll.ids import machine_names
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.wire.messages import Verdict
from atoll.wire.states import JobState
from atoll.wire.swarm import (
    SwarmAnnounce,
    SwarmDone,
    SwarmKeeps,
    SwarmKept,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmUnsaved,
    SwarmWant,
    SwarmWatch,
)

T = TypeVar("T")

RETURN_S = 15.0
"""Time for members to announce themselves to a new ledger, e.g. after a restart of the hub."""

MOVES_KEPT = 20
CHECKPOINTS = 8
"""Approximate number per run, if the job sets no interval."""
STARTS_S = 60.0
"""For this long a job whose first members build their stages is not called paused."""


@dataclass(eq=False)
class SwarmRuntime:
    """One job's ledger, and the requests that wait for its next change."""

    job: str
    ledger: Ledger
    paused: str = ""
    """Why it waits, as last reported; not at the start, before every stage had a member."""
    ran: bool = False
    waits_since: float | None = None
    """Monotonic time since when it waits."""
    moves: deque[MoveView] = field(default_factory=lambda: deque(maxlen=MOVES_KEPT))
    polls: LongPolls = field(default_factory=LongPolls)
    rebuilt: set[tuple[int, int]] = field(default_factory=set)
    """Stages that became the mean of their neighbours, with the step."""
    going_back: asyncio.Lock = field(default_factory=asyncio.Lock)
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)


def settings_of(spec: JobSpec) -> SwarmSettings:
    """Return the part of a job that its ledger needs."""
    swarm = spec.swarm
    known = len(swarm.needs_gb) == swarm.stages
    return SwarmSettings(
        swarm.stages,
        swarm.microbatches,
        early=swarm.early_microbatches,
        agrees=spec.meets_every_step,
        rebalance_s=swarm.rebalance_s,
        steps=spec.train.steps,
        neighbours=swarm.lost_stage == "neighbours",
        save_every=spec.checkpoint.every or max(1, spec.train.steps // CHECKPOINTS),
        needs_bytes=[round(1e9 * needs) for needs in swarm.needs_gb] if known else (),
    )


class SwarmService:
    """Handles the requests of members of SWARM jobs."""

    def __init__(
        self, *, jobs: Jobs, events: Events, checkpoints: Checkpoints, clock: Clock,
        live: Callable[[str], list[str]], rounds: Runtimes, metrics: Metrics,
    ) -> None:  # fmt: skip
        """`live` returns the members of a job whose processes were launched and did not end."""
        self._held_out = HeldOutStore(
            metrics=metrics, events=events, checkpoints=checkpoints, clock=clock
        )
        self._jobs, self._events, self._clock, self._live = jobs, events, clock, live
        self._rounds, self._checkpoints = rounds, checkpoints
        self._whole = WholeMembers(jobs, checkpoints, live)
        self._runtimes: dict[str, SwarmRuntime] = {}

    def ledger(self, job: str) -> Ledger:
        """Return the ledger of a running job; raises HubError if it is no SWARM."""
        return self._runtime(job).ledger

    def view(self, job: str) -> SwarmView | None:
        """Return what people see of a running SWARM; None before its first member came."""
        runtime, record = self._runtimes.get(job), self._jobs.find(job)
        if runtime is None or record is None or record.state != JobState.RUNNING:
            return None
        now, nodes = self._clock.monotonic(), self._nodes(job)
        waits_s = now - runtime.waits_since if runtime.waits_since is not None else 0.0
        return view_of_swarm(
            runtime.ledger, now, nodes=nodes, moves=runtime.moves, whole=self._whole.of(job),
            waits_s=waits_s, starts=not runtime.ran and waits_s < STARTS_S,
        )  # fmt: skip

    def _nodes(self, job: str) -> dict[str, str]:
        record = self._jobs.find(job)
        members = record.members if record is not None else {}
        return {name: member.node for name, member in members.items()}

    # ------------------------------------------------------------------ requests of members

    async def announce(self, job: str, member: str, body: SwarmAnnounce) -> SwarmPlace:
        """Give a member its place; see :meth:`Ledger.announce`."""
        runtime = self._runtime(job)
        if member in self._whole.of(job):  # it serves no stage, and only asks who has its state
            place = await self._whole.place(job, runtime.ledger, body.stage)
        else:
            place = runtime.ledger.announce(member, body, self._clock.monotonic())
            if runtime.ledger.bereft(self._clock.monotonic()) >= 0:
                await self._go_back(runtime)
                place = runtime.ledger.announce(member, body, self._clock.monotonic())
            await self._after(runtime)
        members = self._jobs.get(job).members
        if place.neighbours and (place.stage, place.step) not in runtime.rebuilt:
            runtime.rebuilt.add((place.stage, place.step))
            text = (
                f"no member has stage {place.stage} of step {place.step} any more: it becomes the"
                " mean of the stages beside it"
            )
            await self._events.add(job, "alarm:stage-rebuilt", text, member=member)
        donors = [*place.donors, *(name for near in place.neighbours for name in near)]
        serves = {donor: members[donor].serves for donor in donors if donor in members}
        rounds = self._rounds.of(job)
        known = 0 <= place.stage < len(rounds)
        round_ = rounds[place.stage].machine.committed_round if known else 0
        return msgspec.structs.replace(place, serves=serves, round=round_)

    async def _go_back(self, runtime: SwarmRuntime) -> None:
        """No member has a stage's state: all go on from the newest checkpoint, or the start."""
        async with runtime.going_back:
            ledger, stage = runtime.ledger, -1

            def needed() -> bool:  # no longer, if a member with the state has returned meanwhile
                nonlocal stage
                stage = ledger.bereft(self._clock.monotonic())
                return stage >= 0

            newest = await self._checkpoints.go_back(runtime.job, needed=needed)
            if stage < 0:
                return
            before = ledger.step
            history = await self._checkpoints.stages.history(runtime.job, newest.round)
            ledger.go_back(max(0, newest.round), history, self._clock.monotonic())
            machines = [one.machine for one in self._rounds.of(runtime.job)]
            if not ledger.settings.agrees and all(one.attempt is None for one in machines):
                round_ = max(machine.committed_round for machine in machines)
                for machine in machines:  # the rounds of all stages count alike again
                    machine.committed_round = round_
        if before > ledger.step:
            text = f"no member has stage {stage} of step {before} any more:"
            text += f" all stages go back to step {ledger.step}"
            await self._events.add(runtime.job, "alarm:rewound", text)

    async def want(self, job: str, member: str, body: SwarmWant) -> SwarmLeases:
        """Lease microbatches to a driver, as soon as there are any."""
        runtime = self._runtime(job)

        async def look() -> SwarmLeases | None:
            leases = runtime.ledger.want(member, body, self._clock.monotonic())
            return leases if leases.leases else None

        return await self._when(runtime, look) or SwarmLeases([])

    async def done(self, job: str, body: SwarmDone) -> None:
        """Count a microbatch."""
        runtime = self._runtime(job)
        runtime.ledger.done(body, self._clock.monotonic())
        await self._after(runtime)

    async def kept(self, job: str, member: str, body: SwarmKept) -> SwarmKeeps:
        """Note that a member keeps a copy of another one's sum."""
        return SwarmKeeps(self._runtime(job).ledger.kept(member, body))

    async def unsaved(self, job: str, member: str, body: SwarmUnsaved) -> None:
        """A saver could not save."""
        runtime = self._runtime(job)
        runtime.ledger.saves.failed(member, body.step)
        runtime.ledger.table += 1  # so that each member that watches learns the next saver
        await self._after(runtime)

    async def due(self, job: str, member: str, step: int, stage: int) -> bool:
        """Return whether a member was to save a stage; waits while a new ledger is rebuilt."""
        runtime = self._runtime(job)

        async def look() -> bool | None:
            ledger = runtime.ledger
            ledger.savers()
            named = step <= ledger.step and ledger.saves.named(member, step, stage)
            return named or (None if ledger.rebuilding(self._clock.monotonic()) else False)

        return bool(await self._when(runtime, look))

    async def saved(self, job: str, step: int) -> None:
        """A checkpoint is complete; that of the last step becomes the job's model."""
        runtime = self._runtime(job)
        stages, saves = self._checkpoints.stages, runtime.ledger.saves
        if step >= saves.last:
            await stages.publish_model(job, step)
        saves.complete(step, await stages.history(job, step))
        await self._after(runtime)

    async def watch(self, job: str, member: str, body: SwarmWatch) -> SwarmNews:
        """Return what a member does not know yet, as soon as there is anything."""
        runtime = self._runtime(job)
        runtime.ledger.recent.reported(member, body, self._clock.monotonic())

        async def look() -> SwarmNews | None:
            return runtime.ledger.news(member, body, self._clock.monotonic())

        quiet = SwarmNews(body.step, closing=body.closing, table=body.table)
        return await self._when(runtime, look) or quiet

    # ------------------------------------------------------------------------------- events

    def groups(self, job: Job) -> int:
        """Return the stages of a SWARM, whose members meet by stage."""
        return job.spec.swarm.stages

    def groups_of(self, job: str, member: str) -> Sequence[int]:
        """Return the stage that a member serves, or all stages if it holds the whole model."""
        runtime = self._runtimes.get(job)
        if member in self._whole.of(job):
            return range(self._jobs.get(job).spec.swarm.stages)
        stage = runtime.ledger.stage_of(member) if runtime is not None else -1
        return (stage,) if stage >= 0 else ()

    def meeting(self, job: str, group: int) -> Meeting:
        """Return the members of a stage, and those without which its round would lose a share."""
        runtime, guests = self._runtimes.get(job), frozenset(self._whole.of(job))
        if runtime is None:  # those with the whole model may come before all others
            over = self._whole.stages_over(job, None)
            return Meeting(0 if guests else -1, guests, frozenset(), guests=guests, over=over)
        ledger = runtime.ledger
        members = frozenset(m.holder.member for m in ledger.serving(group)) | guests
        if not ledger.settings.agrees:
            over = self._whole.stages_over(job, ledger) and not members - guests
            # At the planned end all know by themselves which round is the last.
            last = ledger.last and ledger.saves.stopping
            return Meeting(0, members, frozenset(), last=last, guests=guests, over=over)
        count = ledger.counts[group]
        if not count.closing or count.agreed_by:
            return Meeting(-1, members, frozenset())
        return Meeting(count.closing, members, frozenset(ledger.required(group)), ledger.step)

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """The members of a stage have met: they hold its mean."""
        runtime = self._runtimes.get(job)
        if runtime is not None and runtime.ledger.settings.agrees:
            now, members = self._clock.monotonic(), verdict.contributors
            runtime.ledger.agreed(verdict.group, verdict.round, members, now, closing=closing)
            runtime.polls.wake()

    async def begin_again(self, job: str) -> None:
        """A resumed job gets a new ledger."""
        self._forget(job)

    def _forget(self, job: str) -> None:
        runtime = self._runtimes.pop(job, None)
        if runtime is not None:
            runtime.polls.wake()

    def working(self, job: str) -> set[str]:
        """Return the members with the whole model, once the stages have ended.

        Until then members at work meet.
        """
        runtime = self._runtimes.get(job)
        over = self._whole.stages_over(job, runtime.ledger if runtime is not None else None)
        return set(self._whole.of(job)) if over else set()

    def gone(self, job: str, member: str) -> None:
        """A process has ended, or is leaving: what it alone held is leased again."""
        runtime = self._runtimes.get(job)
        if runtime is not None:
            runtime.ledger.lost(member, self._clock.monotonic())
            runtime.polls.wake()

    async def tick(self) -> None:
        """Process what only time brings, and forget ended jobs."""
        for job, runtime in list(self._runtimes.items()):
            record = self._jobs.find(job)
            if record is None or record.state != JobState.RUNNING:
                self._forget(job)
                continue
            now, ledger = self._clock.monotonic(), runtime.ledger
            if record.stopping and not ledger.saves.stopping and not ledger.rebuilding(now):
                ledger.stop()
            ledger.tick(now)
            await self._after(runtime)

    async def _after(self, runtime: SwarmRuntime) -> None:
        """Store evaluations, notify all waiting requests, and people of moves and pauses."""
        await self._store(runtime)
        runtime.polls.wake()
        moves, runtime.ledger.moved = runtime.ledger.moved, []
        for move in moves:
            nodes, wall = self._nodes(runtime.job), self._clock.wall()
            name = machine_names(nodes).get(move.member, move.member)
            runtime.moves.append(
                MoveView(
                    time=wall, member=move.member, name=name,
                    node=nodes.get(move.member, ""), source=move.source, target=move.target,
                    reason=move.reason,
                )
            )  # fmt: skip
            text = f"{move.member} moves from stage {move.source} to stage {move.target}"
            text += f": {move.reason}" if move.reason else ""
            await self._events.add(runtime.job, "stage-moved", text, member=move.member)
        paused = runtime.ledger.paused()
        runtime.ran = runtime.ran or not paused
        if not paused:
            runtime.waits_since = None
        elif runtime.waits_since is None:
            runtime.waits_since = self._clock.monotonic()
        if paused != runtime.paused and runtime.ran:
            runtime.paused = paused
            kind, text = ("paused", f"paused: {paused}") if paused else ("unpaused", "continues")
            await self._events.add(runtime.job, kind, text)

    async def _store(self, runtime: SwarmRuntime) -> None:
        found = runtime.ledger.evaluations.found
        async with runtime.storing:  # requests and the tick come at the same time
            while found:
                # Steps of a SWARM that meets in every step are its rounds; others name the last.
                agrees = runtime.ledger.settings.agrees
                round_ = found[0].step if agrees else self._committed_round(runtime.job)
                await self._held_out.store(runtime.job, found[0], round_=round_)
                del found[0]

    def _committed_round(self, job: str) -> int:
        rounds = self._rounds.of(job)
        return rounds[0].machine.committed_round if rounds else 0

    async def _when(
        self, runtime: SwarmRuntime, look: Callable[[], Awaitable[T | None]]
    ) -> T | None:
        """Return what `look` finds, now or after a change; None if there is no news."""

        def is_open() -> bool:
            return self._runtimes.get(runtime.job) is runtime

        return await runtime.polls.when(look, open_=is_open, clock=self._clock)

    def _runtime(self, job: str) -> SwarmRuntime:
        record, runtime = self._jobs.get(job), self._runtimes.get(job)
        if runtime is not None:
            return runtime
        if record.state != JobState.RUNNING or not record.spec.swarm.stages:
            raise HubError(
                "this job does not train as a SWARM",
                given=job,
                expected='a running job with inner = "swarm"',
            )
        committed = self._committed_round(job)
        ledger = Ledger(
            settings_of(record.spec),
            step=record.start_round,
            # Numbers of an earlier ledger must not come again; it counted at most one per message.
            first_number=int(self._clock.wall() * 1000),
            expected=set(self._live(job)) - set(self._whole.of(job)),
            rebuild_until=self._clock.monotonic() + RETURN_S,
            # Else this hub, or the one before, has forgotten which checkpoint is the newest.
            saved=record.start_round if committed <= record.start_round else -1,
        )
        runtime = self._runtimes[job] = SwarmRuntime(job, ledger)
        return runtime
