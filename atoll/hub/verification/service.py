"""Hosts the verification of jobs with `trust = "audit"`.

Commitments come with the joins of a round; when the round is committed they are appended to
`commitments.jsonl` in the job's folder, and the ledger draws who is challenged. Strikes and the
members' last closings are in `verification.json`. Challenges that are open when a hub process ends
are not continued: their members are challenged again in their next round.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from atoll.clock import Clock
from atoll.errors import HubError, WireError
from atoll.hub.stores import Stores
from atoll.hub.tasks import Tasks
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Planned
from atoll.verification.challenge import Challenge
from atoll.verification.draw import Draw
from atoll.verification.ledger import MemberRound, Notice, VerificationLedger
from atoll.verification.record import STRIKES, VerificationRecord
from atoll.verification.state_file import digests_of
from atoll.verification.trace import state_digest
from atoll.wire.messages import (
    Look,
    Received,
    Verdict,
    VerificationAnswer,
    VerificationAsk,
    VerificationWork,
)
from atoll.wire.states import JobState

logger = logging.getLogger(__name__)

AUDIT = "audit"
RECORD_NAME = "verification.json"
COMMITMENTS_NAME = "commitments.jsonl"
FOLDER = "verification"
"""Folder of a job's handed-over states, each only while its challenge is open."""
MAX_PLANS = 16
"""Attempts whose commitments wait for a verdict."""

Fail = Callable[..., Awaitable[None]]


@dataclass
class _Attempt:
    """What is known of an attempt before its verdict."""

    round: int
    members: dict[str, MemberRound]
    packets: Mapping[str, str] = field(default_factory=dict)
    looks: Mapping[str, Look] = field(default_factory=dict)


@dataclass(eq=False)
class _Runtime:
    """One job's ledger."""

    job: str
    ledger: VerificationLedger
    attempts: OrderedDict[int, _Attempt] = field(default_factory=OrderedDict)
    written: bytes = b""
    processes: dict[int, int] = field(default_factory=dict)
    """Challenge -> number of the challenged process."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the record is written."""


class VerificationService:
    """Takes commitments and findings, hands out tasks, evicts."""

    def __init__(
        self, stores: Stores, *, clock: Clock, tasks: Tasks, live: Callable[[str], list[str]],
        fail: Fail,
    ) -> None:  # fmt: skip
        """`live` returns the members of a job that run; `fail` ends one for good."""
        self._jobs, self._files = stores.jobs, stores.files
        self._events, self._auth = stores.events, stores.auth
        self._clock, self._tasks, self._live, self._fail = clock, tasks, live, fail
        self._runtimes: dict[str, _Runtime] = {}

    # ------------------------------------------------------------------------------- rounds

    def planned(self, effect: Planned, slots: DataSlots) -> None:
        """Keep the commitments of an attempt's members until its verdict."""
        plan = effect.plan
        if not plan.verified or not any(join.commitment for join in effect.joins.values()):
            return  # a round in which no member contributes work, e.g. the first one
        members = {}
        for name, join in effect.joins.items():
            if name not in plan.members:
                continue
            lease = slots.lease(name)
            members[name] = MemberRound(
                join.commitment, join.base, slot=lease.slot, cursor=dict(lease.cursor),
                busy_s=min(3600.0, max(0.0, join.busy_s)),
            )  # fmt: skip
        runtime = self._runtime(plan.job)
        runtime.attempts[plan.epoch] = _Attempt(plan.round, members)
        while len(runtime.attempts) > MAX_PLANS:
            runtime.attempts.popitem(last=False)

    def received(self, job: str, body: Received) -> None:
        """The reducer has reported what it got."""
        runtime = self._runtimes.get(job)
        attempt = runtime.attempts.get(body.epoch) if runtime is not None else None
        if attempt is not None:
            attempt.packets, attempt.looks = dict(body.packets), dict(body.looks)

    def committed(self, job: str, verdict: Verdict) -> None:
        """A round was committed: draw who is challenged."""
        runtime = self._runtimes.get(job)
        attempt = runtime.attempts.pop(verdict.epoch, None) if runtime is not None else None
        if runtime is None or attempt is None:
            return
        runtime.attempts.clear()  # older ones were aborted
        members = {
            name: replace(known, packet=attempt.packets.get(name, ""))
            for name, known in attempt.members.items()
        }
        now = self._clock.monotonic()
        notices = runtime.ledger.committed(attempt.round, members, now, looks=attempt.looks)
        processes = self._jobs.get(job).members
        runtime.processes = {
            number: runtime.processes.get(number, processes[one.member].attempt)
            for number, one in runtime.ledger.open.items()
        }
        lines = [
            msgspec.json.encode(
                {"round": attempt.round, "member": name, "commitment": one.commitment}
            )
            for name, one in members.items()
        ]
        self._tasks.start(self._after(runtime, notices, lines), name=f"verification of {job}")

    def watched(self, job: str) -> frozenset[str]:
        """Return the members with a strike that have not made up for it since."""
        return frozenset(self._runtime(job).ledger.draw.distrusted)

    # ---------------------------------------------------------------------------- requests

    def ask(self, job: str, member: str, body: VerificationAsk) -> VerificationWork:
        """Return what a member is to do now."""
        runtime = self._running(job)
        if runtime is None:
            return VerificationWork()
        runtime.ledger.working(member, body.doing, self._clock.monotonic())
        return VerificationWork(runtime.ledger.tasks(member), runtime.ledger.drawn)

    async def answer(self, job: str, member: str, body: VerificationAnswer) -> None:
        """Take what a member has found."""
        runtime = self._running(job)
        if runtime is not None:
            notices = runtime.ledger.answer(member, body, self._clock.monotonic())
            await self._after(runtime, notices)

    async def take_state(
        self, job: str, member: str, number: int, position: int, stream: AsyncIterator[bytes]
    ) -> None:
        """Take the state after so many steps, from the member that is to hand it over.

        Raises:
            HubError: no challenge waits for it from this member.
            WireError: its digest is not the one that it has to have.
            StorageFull: the disk is full.
        """
        runtime, challenge = self._expected(job, member, number, position)
        expected, name = challenge.state_before(position), _name(number, position)
        # Checked under another name: no member may fetch a state that was not checked.
        arrived = f"{name}-{secrets.token_hex(8)}"
        await self._files.put(job, arrived, self._patiently(challenge, stream))
        path = self._files.path(job, arrived)
        try:
            found = state_digest(*await asyncio.to_thread(digests_of, path))
            if found != expected:
                raise WireError(
                    "this is not the state that was committed to", given=found, expected=expected
                )
            self._expected(job, member, number, position)  # no other upload was accepted meanwhile
            path.replace(self._files.path(job, name))
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        now = self._clock.monotonic()
        notices = runtime.ledger.deposited(member, number, position, now)
        await self._after(runtime, notices)

    def state_path(self, job: str, member: str, number: int, position: int) -> Path:
        """Return the file of a state that a member needs for its task.

        Raises:
            HubError: this member has no task that needs it, or it was not handed over.
        """
        runtime = self._running(job)
        challenge = runtime.ledger.open.get(number) if runtime is not None else None
        task = challenge.task(member) if challenge is not None else None
        if task is None:
            raise HubError("this member has no task that needs a state", given=member)
        path = self._files.path(job, _name(number, position))
        if not path.is_file():
            raise HubError("this state was not handed over", given=f"after {position} steps")
        return path

    def _expected(
        self, job: str, member: str, number: int, position: int
    ) -> tuple[_Runtime, Challenge]:
        runtime = self._running(job)
        challenge = runtime.ledger.open.get(number) if runtime is not None else None
        if runtime is None or challenge is None or not challenge.wants(member, position):
            raise HubError(
                "no challenge waits for this state", given=f"{member}, challenge {number}"
            )
        return runtime, challenge

    async def _patiently(
        self, challenge: Challenge, stream: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Pass a state on; while its bytes come, its sender is not late."""
        limit, stage = challenge.deadline + 20 * challenge.facts.patience_s, challenge.stage
        async for piece in stream:
            if challenge.stage == stage:  # else the deadline is that of another member
                late = self._clock.monotonic() + challenge.facts.patience_s
                challenge.deadline = max(challenge.deadline, min(limit, late))
            yield piece

    # ------------------------------------------------------------------------------- people

    def view(self, job: str) -> dict[str, Any] | None:
        """Return what people see; None for a job that is not verified."""
        record = self._jobs.find(job)
        if record is None or record.spec.job.trust != AUDIT:
            return None
        runtime = self._runtimes.get(job)
        if runtime is None and record.state == JobState.RUNNING:
            runtime = self._runtime(job)
        known = runtime.ledger.record() if runtime is not None else self._on_disk(job)
        open_ = runtime.ledger.open.values() if runtime is not None else ()
        return {
            "share": record.spec.job.audit_share, "strikes_allowed": STRIKES,
            "members": {
                name: {**msgspec.to_builtins(one), "closing": ""}
                for name, one in known.members.items()
            },
            "open": [
                {
                    "number": one.number, "round": one.facts.round, "member": one.member,
                    "why": one.why, "stage": one.stage, "checker": one.checker,
                    "judge": one.judge,
                }
                for one in open_
            ],
            "settled": [msgspec.to_builtins(one) for one in reversed(known.settled)],
        }  # fmt: skip

    # ------------------------------------------------------------------------------ changes

    async def tick(self) -> None:
        """Process what only time brings, and find helpers; forget ended jobs."""
        now = self._clock.monotonic()
        for job, runtime in list(self._runtimes.items()):
            record = self._jobs.find(job)
            if record is None or record.state != JobState.RUNNING:
                del self._runtimes[job]
                await self._drop_states(runtime, keep=())
                continue
            live, ledger = self._live(job), runtime.ledger
            if not ledger.open:
                continue
            notices: list[Notice] = []
            for member in {name for one in ledger.open.values() for name in one.waits_for}:
                if member not in live:
                    notices += ledger.gone(member, now)
            for number, challenge in list(ledger.open.items()):
                # A new process has not kept what its predecessor began with.
                process = record.members[challenge.member].attempt
                if runtime.processes.setdefault(number, process) != process:
                    notices += ledger.gone(challenge.member, now)
            notices += ledger.tick(live, now)
            await self._after(runtime, notices)

    async def _after(
        self, runtime: _Runtime, notices: list[Notice], lines: list[bytes] | None = None
    ) -> None:
        """Write what has changed, then inform people, and evict."""
        job, ledger = runtime.job, runtime.ledger
        for one in reversed(ledger.book.settled):
            if one.at:
                break
            one.at = self._clock.wall()
        async with runtime.lock:
            if lines:
                path = self._jobs.folder(job) / COMMITMENTS_NAME
                await asyncio.to_thread(_append, path, lines)
            written = msgspec.json.encode(ledger.record())
            if written != runtime.written:
                await self._files.write(job, RECORD_NAME, written)
                runtime.written = written
        await self._drop_states(runtime, keep=ledger.open)
        for notice in notices:
            kind = "alarm:evicted" if notice.kind == "evicted" else notice.kind
            kind = {"unchecked": "alarm:unchecked", "undecided": "alarm:undecided"}.get(kind, kind)
            await self._events.add(job, kind, notice.text, member=notice.member)
            logger.warning("%s: %s", job, notice.text)
            if notice.kind == "evicted":
                # Not here: the rounds may hold the lock that ending a member needs.
                work = self._evict(job, notice.member, notice.text)
                self._tasks.start(work, name=f"eviction of {job}/{notice.member}")

    async def _evict(self, job: str, member: str, why: str) -> None:
        error = {
            "kind": "Evicted", "what": f"it did not compute what the job says: {why}",
            "given": "", "expected": "", "remedy": "atoll challenges " + job,
        }  # fmt: skip
        await self._auth.revoke_member(job, member)
        await self._fail(job, member, error=error)

    async def _drop_states(self, runtime: _Runtime, *, keep: Any) -> None:
        folder = self._jobs.folder(runtime.job) / FOLDER
        kept, last = {str(number) for number in keep}, runtime.ledger.number

        def drop() -> None:
            with suppress(OSError):
                for path in folder.iterdir():
                    number = path.name.partition("-")[0]
                    later = number.isdecimal() and int(number) > last  # it has begun meanwhile
                    if number not in kept and not later:
                        path.unlink(missing_ok=True)

        await asyncio.to_thread(drop)

    # ----------------------------------------------------------------------------- look-ups

    def _running(self, job: str) -> _Runtime | None:
        return self._runtimes.get(job)

    def _runtime(self, job: str) -> _Runtime:
        found = self._runtimes.get(job)
        if found is None:
            share = self._jobs.get(job).spec.job.audit_share
            ledger = VerificationLedger(Draw(random.SystemRandom(), share=share))
            ledger.recall(self._on_disk(job))
            found = self._runtimes[job] = _Runtime(job, ledger)
        return found

    def _on_disk(self, job: str) -> VerificationRecord:
        path = self._jobs.folder(job) / RECORD_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=VerificationRecord)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s: the record of its verification is not usable: %s", job, error)
        return VerificationRecord()


def _name(number: int, position: int) -> str:
    return f"{FOLDER}/{number}-{position}"


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
