"""Hosts the ledgers of jobs whose models have paths: answers members when there is news.

A ledger is written to `paths.json` in the job's folder before any member receives a change of
turns. A new hub process goes on from there; who holds which module the members report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from atoll.clock import Clock
from atoll.config import JobSpec
from atoll.errors import HubError
from atoll.hub.jobs.jobs import Job
from atoll.hub.long_polls import LongPolls
from atoll.hub.observability.latest import Latest
from atoll.hub.paths.view import Around, PathsView, view_of_paths
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.groups import Meeting, Runtimes
from atoll.hub.stores import Stores
from atoll.paths.layout import PathLayout
from atoll.paths.ledger import PathLedger, PathRecord, PathSettings
from atoll.wire.messages import Verdict
from atoll.wire.paths import PathAsk, PathMeeting, PathTrained, PathTurn
from atoll.wire.states import JobState

T = TypeVar("T")
logger = logging.getLogger(__name__)

RECORD_NAME = "paths.json"
SILENT_S = 20.0
"""A member that is to train and was silent for so long loses its turn: it may be asleep."""


@dataclass(eq=False)
class PathRuntime:
    """One job's ledger, and the requests that wait for its next change."""

    job: str
    ledger: PathLedger
    written: bytes = b""
    """The ledger as it is on disk."""
    changes: int = 0
    """Losses that may not be on disk yet: no request has looked since."""
    announced: set[int] = field(default_factory=set)
    """Phases of which an event says which paths do not count."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the ledger is changed and written."""
    polls: LongPolls = field(default_factory=LongPolls)


def settings_of(spec: JobSpec, *, start_s: float) -> PathSettings:
    """Return the part of a job that its ledger needs."""
    return PathSettings(layout=layout_of(spec), save_every=spec.checkpoint.every, start_s=start_s)


def layout_of(spec: JobSpec) -> PathLayout:
    """Return the modules of a job's levels."""
    return PathLayout.of(spec.dipaco.modules, copies=spec.dipaco.copies)


def undealt(record: PathRecord) -> PathRecord:
    """Return the part of a record that is kept when the job ends."""
    return msgspec.structs.replace(
        record, dealt={}, lost=[], exported=[], processes={}, opened=False, last=False, over=False
    )


class PathService:
    """Handles the requests of members that train paths; decides who meets in a module's round."""

    def __init__(
        self, stores: Stores, *, checkpoints: Checkpoints, clock: Clock, rounds: Runtimes,
        live: Callable[[str], list[str]], unheard_s: Callable[[str, str], float],
        start_s: float = 120.0,
    ) -> None:  # fmt: skip
        """`live` returns the members of a job whose processes were launched and did not end.

        `unheard_s` returns for how many seconds a member was silent; the first phase waits
        `start_s` for members that still start.
        """
        self._unheard_s = unheard_s
        self._jobs, self._files, self._events = stores.jobs, stores.files, stores.events
        self._clock = clock
        self._live, self._rounds, self._checkpoints = live, rounds, checkpoints
        self._start_s = start_s
        self._runtimes: dict[str, PathRuntime] = {}
        self._records: dict[str, PathRecord | None] = {}
        """Of jobs that have no ledger now, as they were read from the disk."""

    def ledger(self, job: str) -> PathLedger:
        """Return the ledger of a running job; raises HubError if it trains no paths."""
        return self._runtime(job).ledger

    def find(self, job: str) -> PathLedger | None:
        """Return the ledger of a job whose rounds are open; None: it has none."""
        record = self._jobs.find(job)
        if record is None or record.state != JobState.RUNNING or job not in self._rounds:
            return None
        return self._runtime(job).ledger if record.spec.dipaco.modules else None

    def view(self, job: str, latest: Mapping[str, Latest]) -> PathsView | None:
        """Return what people see of a job's paths, also after its end; None: it never had any.

        `latest` are the newest metrics by member.
        """
        runtime, known = self._runtimes.get(job), self._jobs.get(job)
        if not known.spec.dipaco.modules:
            return None
        if runtime is None and job not in self._records:
            found = self._read(job)
            self._records[job] = None if found is None else undealt(found)
        record = self._records[job] if runtime is None else runtime.ledger.record()
        if record is None:
            return None
        around = Around(
            ended=known.state != JobState.RUNNING,
            nodes={name: member.node for name, member in known.members.items()},
            holds={} if runtime is None else runtime.ledger.holds,
            rounds=self._rounds_of(job),
            latest=latest,
        )
        return view_of_paths(layout_of(known.spec), record, around)

    # ------------------------------------------------------------------ requests of members

    async def ask(self, job: str, member: str, body: PathAsk) -> PathTurn:
        """Return a member's next turn, as soon as it has one; see :meth:`PathLedger.ask`."""
        runtime = self._runtime(job)
        newest = await self._checkpoints.newest(job)
        # Not later: another request may know a newer one by then.
        runtime.ledger.checkpoint = newest.round

        async def look() -> PathTurn | None:
            ledger = runtime.ledger
            ledger.stopping = self._jobs.get(job).stopping
            ledger.rounds = self._rounds_of(job)
            before = ledger.news
            turn = ledger.ask(member, body, self._clock.monotonic())
            await self._after(runtime, before)
            return turn

        self._hold(runtime, member, body)
        turn = await self._when(runtime, look, member=member)
        if turn is None:
            return PathTurn()
        members = self._jobs.get(job).members
        donors = {name for near in turn.donors.values() for name in near}
        serves = {name: members[name].serves for name in donors if name in members}
        return msgspec.structs.replace(turn, serves=serves)

    async def trained(self, job: str, member: str, body: PathTrained) -> PathMeeting:
        """A member has trained its paths; answer once all have; see :meth:`PathLedger.train`."""
        runtime = self._runtime(job)

        async def look() -> PathMeeting | None:
            ledger = runtime.ledger
            before = ledger.news
            found = ledger.train(member, body)
            await self._after(runtime, before)
            return found

        self._hold(runtime, member, body)
        return await self._when(runtime, look, member=member) or PathMeeting()

    def due(self, job: str, member: str, phase: int, module: int) -> bool:
        """Return whether a member was to save a module; see :meth:`PathLedger.saves`."""
        return self._runtime(job).ledger.saves(member, phase, module)

    def _hold(self, runtime: PathRuntime, member: str, said: PathAsk | PathTrained) -> None:
        runtime.ledger.rounds = self._rounds_of(runtime.job)
        runtime.ledger.hold(member, said)

    def _rounds_of(self, job: str) -> dict[int, int]:
        """Return the committed rounds of each module."""
        runtimes = self._rounds.of(job)
        return {one.machine.group: one.machine.committed_round for one in runtimes}

    # ------------------------------------------------------- `Meetings`, for rounds of modules

    def groups(self, job: Job) -> int:
        """Return the number of modules; 0: the job has no paths."""
        return sum(job.spec.dipaco.modules)

    def groups_of(self, job: str, member: str) -> Sequence[int]:
        """Return the modules in whose rounds a member takes part."""
        ledger = self.find(job)
        return ledger.groups_of(member) if ledger is not None else ()

    def meeting(self, job: str, group: int) -> Meeting:
        """Return the members with a path through a module, in the last phase that was trained."""
        ledger = self.find(job)
        members = ledger.meets.get(group, frozenset()) if ledger is not None else frozenset()
        return Meeting(0 if members else -1, members, frozenset())

    def committed(self, job: str, verdict: Verdict, closing: int) -> None:
        """The holders of a module have met: they hold the result."""
        runtime = self._runtimes.get(job)
        if runtime is not None:
            runtime.ledger.committed(verdict.group, verdict.contributors)

    async def begin_again(self, job: str) -> None:
        """Keep the figures and least losses of a resumed job; its paths are assigned anew."""
        before = self._runtimes.get(job)
        self._end(job)
        async with before.lock if before is not None else asyncio.Lock():  # it may be writing
            record = self._read(job)
            if record is not None:
                await self._files.write(job, RECORD_NAME, msgspec.json.encode(undealt(record)))

    def working(self, job: str) -> set[str]:
        """Return the members with paths, or that wait for some, or for the end."""
        ledger = self.find(job)
        return {*ledger.assigned, *ledger.waiting} if ledger is not None else set()

    def gone(self, job: str, member: str) -> None:
        """A process has ended, leaves, or was silent for too long: its turn is lost."""
        runtime = self._runtimes.get(job)
        if runtime is not None:
            runtime.ledger.gone(member)
            runtime.changes += 1
            runtime.polls.wake()

    # ------------------------------------------------------------------------------- events

    async def tick(self) -> None:
        """Notice silent members and what only time brings; forget ended jobs."""
        self._records = {job: one for job, one in self._records.items() if self._jobs.knows(job)}
        for job, runtime in list(self._runtimes.items()):
            record = self._jobs.find(job)
            if record is None or record.state != JobState.RUNNING:
                self._end(job)
                continue
            ledger = runtime.ledger
            for member in sorted(ledger.awaited | ledger.unheard):
                if self._unheard_s(job, member) > SILENT_S:
                    text = f"{member} is silent: phase {ledger.phase} goes on without it"
                    self.gone(job, member)
                    await self._events.add(job, "member-silent", text, member=member)
            if runtime.changes:
                runtime.changes = 0
                async with runtime.lock:
                    if self._runtimes.get(job) is runtime:
                        await self._after(runtime, ledger.news)
            if ledger.waiting and not ledger.awaited:
                runtime.polls.wake()

    def _end(self, job: str) -> None:
        runtime = self._runtimes.pop(job, None)
        if runtime is not None:
            self._records[job] = undealt(runtime.ledger.record())
            runtime.polls.wake()

    async def _after(self, runtime: PathRuntime, before: tuple[object, ...]) -> None:
        """Write what has changed, then notify all waiting requests, and people."""
        ledger, job = runtime.ledger, runtime.job
        record = msgspec.json.encode(ledger.record())
        if record != runtime.written:
            await self._files.write(job, RECORD_NAME, record)
            runtime.written = record
        if ledger.news == before:
            return
        if ledger.history != before[1]:
            text = (
                f"no member has any module of phase {before[0]} any more: all paths go on from"
                f" phase {ledger.phase}"
            )
            await self._events.add(job, "alarm:rewound", text)
        for phase in sorted(ledger.missed.keys() - runtime.announced):
            lost = ledger.missed[phase]
            paths = ", ".join(f"{path} of {lost[path]}" for path in sorted(lost))
            await self._events.add(job, "path-missed", f"phase {phase} goes without path {paths}")
        runtime.announced = set(ledger.missed)
        runtime.polls.wake()

    async def _when(
        self, runtime: PathRuntime, look: Callable[[], Awaitable[T | None]], *, member: str
    ) -> T | None:
        """Return what `look` finds, now or after a change; None if there is no news.

        A process that has ended meanwhile asks for nothing any more.
        """
        attempt = self._attempt(runtime.job, member)

        def is_open() -> bool:
            hosted = self._runtimes.get(runtime.job) is runtime
            return hosted and attempt > 0 and self._attempt(runtime.job, member) == attempt

        async def look_alone() -> T | None:
            async with runtime.lock:
                return await look() if is_open() else None

        return await runtime.polls.when(look_alone, open_=is_open, clock=self._clock)

    def _attempt(self, job: str, member: str) -> int:
        """Return the number of a member's process; 0: it has ended."""
        record = self._jobs.get(job).members.get(member)
        return record.attempt if record is not None and record.live else 0

    def _runtime(self, job: str) -> PathRuntime:
        record, runtime = self._jobs.get(job), self._runtimes.get(job)
        if record.state != JobState.RUNNING or not record.spec.dipaco.modules:
            raise HubError(
                "this job trains no paths", given=job, expected='a running job with inner = "paths"'
            )
        if runtime is not None:
            return runtime
        ledger = PathLedger(
            settings_of(record.spec, start_s=self._start_s), record.start_round,
            set(self._live(job)), self._clock.monotonic(),
        )  # fmt: skip
        runtime = self._runtimes[job] = PathRuntime(job, ledger)
        self._records.pop(job, None)
        self._recall(runtime)
        return runtime

    def _recall(self, runtime: PathRuntime) -> None:
        """Take over what an earlier hub process has written, unless the job was resumed since."""
        known = self._read(runtime.job)
        if known is None:
            return
        ledger, here = runtime.ledger, set(self._live(runtime.job))
        ledger.missed, runtime.announced = dict(known.missed), set(known.missed)
        if not known.dealt:  # resumed: the least losses so far still hold
            ledger.best, ledger.history = dict(known.best), known.history + 1
            ledger.recall_figures(known)
            return
        ledger.recall(known)
        ledger.expected -= known.dealt.keys()
        for one in self._rounds.of(runtime.job):
            module = one.machine.group
            for verdict in one.verdicts.values():
                if verdict.committed and verdict.round == known.rounds.get(module):
                    ledger.counted[module] = set(verdict.contributors)
        for member in (known.dealt.keys() | known.processes.keys()) - here:
            ledger.gone(member)

    def _read(self, job: str) -> PathRecord | None:
        """Return what an earlier hub process has written of a job, if anything usable."""
        path = self._jobs.folder(job) / RECORD_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=PathRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s: the record of its paths is not usable: %s", job, error)
            return None
