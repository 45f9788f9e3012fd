"""Answers members that lack the committed state: its holders, and the data slot to train on.

If no member holds it any more, the run is set back to its newest complete checkpoint, durably and
with an alarm; only the work after it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib

from atoll.clock import Clock
from atoll.errors import GroupError
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.observability.events import Events
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.runtime import RoundRuntime
from atoll.hub.rounds.service import RoundService
from atoll.rounds.checks import RECOVERING
from atoll.rounds.machine import RoundMachine
from atoll.units import size
from atoll.wire.messages import Recover, Source, Sources, Standing
from atoll.wire.states import MemberState

VERDICT_WAIT_S = 60.0
"""Maximum wait for the verdict on an open attempt, which decides the state to transfer."""


RETURN_S = 30.0
"""How long lost members with an unknown fate may reconnect if only they hold the state."""

POLL_S = 0.25


class RecoveryCoordinator:
    """Handles Recover and Standing messages."""

    def __init__(
        self,
        *,
        rounds: RoundService,
        jobs: Jobs,
        events: Events,
        checkpoints: Checkpoints,
        clock: Clock,
    ) -> None:
        self._rounds = rounds
        self._jobs = jobs
        self._events = events
        self._checkpoints = checkpoints
        self._clock = clock

    async def wait_for(self, job: str, member: str) -> None:
        """Let its groups' rounds wait a bounded time while a member takes over their states."""
        for runtime in self._rounds.runtimes.all_of(job, member):
            async with runtime.lock:
                effects = runtime.machine.recover(member, self._clock.monotonic())
                await self._rounds.carry_out(runtime, effects)

    async def recover(self, job: str, member: str, body: Recover) -> Sources:
        """Return the holders of the committed state; rounds wait a bounded time for this member.

        Raises GroupError if the job is ending, so that the state is no longer needed.
        """
        runtime = self._rounds.runtime(job)
        if body.ready:
            async with runtime.lock:
                effects = runtime.machine.recover(
                    member, self._clock.monotonic(), needs_s=body.needs_s
                )
                runtime.refuse(member, GroupError(RECOVERING, given=member))
                await self._rounds.carry_out(runtime, effects)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_WAIT_S):
                    await runtime.decided.wait()
        deadline = self._clock.monotonic() + RETURN_S
        while True:
            async with runtime.lock:
                runtime.check_open()
                named = runtime.machine.members.holders(member, body.failed)
                holders = [m for m in named if self._rounds.is_here(runtime, m)]
                late = self._clock.monotonic() >= deadline
                if holders or late or not self._may_return(runtime):
                    checkpoint = -1 if holders else await self._set_back(runtime, member)
                    return self._sources(runtime.machine, member, holders, checkpoint)
            await asyncio.sleep(POLL_S)

    async def standing(self, job: str, member: str, body: Standing) -> None:
        """Record that a member has the committed state; raises LeftBehind if it is outdated."""
        runtime = self._rounds.runtime(job)
        async with runtime.lock:
            now = self._clock.monotonic()
            effects = runtime.machine.stand(member, body.round, body.base, now)
            process = self._jobs.get(job).process(member)
            who = process.node if process is not None else member
            took = f"{size(body.nbytes)} in {body.seconds:.1f} s"
            fields = {"round": str(body.round), "from": ", ".join(body.sources)}
            late = member in runtime.late
            runtime.late.discard(member)
            text = f"{who} caught up ({took})"
            if late:
                text = f"{who} was late; it caught up and rejoined ({took})"
            await self._events.add(job, "recovered", text, member=member, fields=fields)
            await self._rounds.carry_out(runtime, effects)

    def _may_return(self, runtime: RoundRuntime) -> bool:
        """Return whether a process that held the state may still be running."""
        members = self._jobs.get(runtime.job).members
        missed = [members[m] for m in runtime.machine.members.missed() if m in members]
        return any(  # a live one is about to reconnect
            (m.live or m.state == MemberState.LOST) and m.exit_code is None for m in missed
        )

    def _sources(
        self, machine: RoundMachine, member: str, holders: list[str], checkpoint: int
    ) -> Sources:
        record, leases = self._jobs.get(machine.job), machine.commit_log.data_slots
        pace = machine.newcomer(member, self._clock.monotonic(), whole=not holders)
        return Sources(
            round=machine.committed_round,
            peers=[Source(m, record.members[m].serves) for m in holders if m in record.members],
            checkpoint_round=checkpoint,
            pace=pace,
            lease=leases.lease(member) if leases.cursors else None,
        )

    async def _set_back(self, runtime: RoundRuntime, member: str) -> int:
        """Rewind to the newest complete checkpoint; return its round (-1: the beginning)."""
        machine, record = runtime.machine, self._jobs.get(runtime.job)
        if any(m.state == MemberState.DONE for m in record.members.values()):
            raise GroupError("the job is ending: all members with its state are done", given=member)
        checkpoint = (await self._checkpoints.go_back(runtime.job)).round
        round_ = max(0, checkpoint)
        if round_ == machine.committed_round:
            return checkpoint
        before = machine.committed_round
        cursors = await self._rounds.store.cursors_at(runtime.job, round_)
        machine.rewind(round_, cursors)
        outsiders = machine.members.outsiders & record.members.keys()
        await self._rounds.store.set_round(
            runtime.job,
            round_,
            cursors,
            start_round=machine.start_round,
            outsiders={m: record.members[m].attempt for m in outsiders},
        )
        text = (
            f"no member has the state of round {before} any more:"
            f" the run goes back to round {round_}"
        )
        await self._events.add(runtime.job, "alarm:rewound", text, member=member)
        return checkpoint
