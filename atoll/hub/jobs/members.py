"""The state of every process of a job. Only this module writes it; others ask for a transition."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from atoll.errors import HubError
from atoll.hub.jobs.completion import MAX_FAILURES, end_state, restarts_exhausted
from atoll.hub.jobs.fields import change_fields
from atoll.hub.jobs.record import Job, Member
from atoll.hub.observability.events import Events
from atoll.ids import is_follower
from atoll.wire.states import MemberState, ProcessPhase

MAX_TAIL = 50
"""Last lines of a process that are kept."""
MAX_RESULT_BYTES = 256 * 1024
MAX_TEXT, MAX_TEXTS = 8_192, 16
"""Maximum characters of a text of an error or of a last line, and maximum texts of an error: the
record of a job is always written as a whole."""

_ENDS = frozenset(
    {
        MemberState.DONE,
        MemberState.FAILED,
        MemberState.LOST,
        MemberState.LEFT,
        MemberState.STOPPED,
    }
)

TRANSITIONS: Mapping[MemberState, frozenset[MemberState]] = {
    # Assigned anew if the hub was killed before it stored that the job runs.
    MemberState.ASSIGNED: _ENDS | {MemberState.ASSIGNED, MemberState.STARTING, MemberState.RUNNING},
    MemberState.STARTING: _ENDS | {MemberState.STARTING, MemberState.RUNNING},
    MemberState.RUNNING: _ENDS | {MemberState.RUNNING},
    # It may return, or its end becomes known after all.
    MemberState.LOST: _ENDS | {MemberState.RUNNING, MemberState.ASSIGNED},
    # `Finished` can arrive after the exit of the process.
    MemberState.LEFT: frozenset(
        {MemberState.DONE, MemberState.FAILED, MemberState.STOPPED, MemberState.ASSIGNED}
    ),
    MemberState.STOPPED: frozenset(
        {MemberState.DONE, MemberState.FAILED, MemberState.STOPPED, MemberState.ASSIGNED}
    ),
    # It is not launched again, the job is resumed, or it is launched again.
    MemberState.FAILED: frozenset({MemberState.FAILED, MemberState.STOPPED, MemberState.ASSIGNED}),
    # The job is resumed, or a follower is launched again for a live member.
    MemberState.DONE: frozenset({MemberState.STOPPED, MemberState.ASSIGNED}),
}
"""State of a process -> the states that may follow."""

_FIELDS = frozenset(Member.__struct_fields__) - {"member", "state"}
_encode = msgspec.json.Encoder().encode


def describe_exit(process: Member, exit_code: int | None) -> str:
    """Return how a process ended, in a sentence about its machine."""
    number = -exit_code if exit_code is not None and exit_code < 0 else 0
    how = (
        f"was killed ({_signal_name(number)})" if number else f"ended with exit status {exit_code}"
    )
    error = process.error or {}
    what, given = error.get("what") or "", error.get("given") or ""
    given = "" if given == process.member else given
    if what.endswith(how) or (number and what.endswith("was killed")):  # it says no more than that
        what = given = ""
    return ": ".join(filter(None, (f"{process.node}'s worker {how}", what, given)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Members:
    """The processes of all jobs: one method for each transition, with its event."""

    def __init__(
        self,
        *,
        job: Callable[[str], Job],
        save: Callable[[Job], Awaitable[None]],
        events: Events,
    ) -> None:
        """`job` returns a record by name, `save` returns when it is on disk, however late."""
        self._job = job
        self._save = save
        self._events = events

    async def update(self, job: str, member: str, **changes: Any) -> Member:
        """Change fields other than the state.

        Raises:
            HubError: the job has no such process.
            ConfigError: there is no such field.
        """
        record, found = self._find(job, member)
        return await self._change(record, found, changes)

    async def assign(
        self, job: str, *, member: str, slot: int, node: str, failures: int = 0, retried: int = 0
    ) -> Member:
        """Assign a process to a node; `failures` and `retried` are carried over to a next attempt.

        Raises:
            HubError: the process has started and not ended.
        """
        record = self._job(job)
        assigned = next_attempt(
            record, member, slot=slot, node=node, failures=failures, retried=retried
        )
        (record.followers if is_follower(member) else record.members)[member] = assigned
        await self._save(record)
        again = "" if assigned.attempt == 1 else f" again (attempt {assigned.attempt})"
        await self._events.add(job, "assigned", f"{node} starts a worker{again}", member=member)
        return assigned

    async def launched(self, job: str, member: str, phase: ProcessPhase) -> None:
        """Record what the node reports of a launch.

        A process that never connects to the hub counts as running when it starts.
        """
        record, found = self._find(job, member)
        running = phase == ProcessPhase.RUNNING or (record.silent and not found.incarnation)
        state = MemberState.RUNNING if running else MemberState.STARTING
        await self._move(record, found, state)

    async def connected(self, job: str, member: str, *, incarnation: str) -> bool:
        """Record that the process has a session; return whether it was lost before."""
        record, found = self._find(job, member)
        back = found.state == MemberState.LOST
        await self._move(record, found, MemberState.RUNNING, incarnation=incarnation)
        if back:
            text = f"{found.node} is back"
            await self._events.add(job, "member-back", text, member=member)
        return back

    async def returned(self, job: str, member: str) -> None:
        """Record that a lost process without a session runs again, because its node is back."""
        record, found = self._find(job, member)
        await self._move(record, found, MemberState.RUNNING)
        text = f"{found.node} is back"
        await self._events.add(job, "member-back", text, member=member)

    def takes_part(self, job: str, member: str) -> None:
        """Record that a member takes part in rounds; stored with its next change of state."""
        record = self._job(job)
        if member in record.members:
            record.members[member].in_rounds = True

    async def finished(
        self,
        job: str,
        member: str,
        *,
        ok: bool,
        result: dict[str, Any],
        error: dict[str, str] | None,
    ) -> None:
        """Record the result or the error that a process reports at its end."""
        record, found = self._find(job, member)
        if len(_encode(result)) > MAX_RESULT_BYTES:
            result = {"left_out": f"the result was larger than {MAX_RESULT_BYTES} bytes"}
        state = MemberState.DONE if ok else MemberState.FAILED
        await self._move(record, found, state, result=result, error=error)
        what = "" if error is None else ": " + error.get("what", "")
        text = f"{found.node} {'is done' if ok else 'failed'}{what}"
        await self._events.add(job, f"member-{state}", text, member=member)

    async def exited(self, job: str, member: str, exit_code: int | None) -> MemberState:
        """Record the exit of a process that has not reported its end; return its state."""
        record, found = self._find(job, member)
        state = end_state(found, exit_code, stopping=record.stopping)
        await self._move(record, found, state)
        if state == MemberState.LEFT:
            await self._events.add(job, "member-left", f"{found.node} has left", member=member)
        elif state == MemberState.FAILED:
            text = describe_exit(found, exit_code)
            text += "" if restarts_exhausted(found, record) else "; restarting"
            await self._events.add(job, "member-failed", text, member=member)
        return state

    async def lost(self, job: str, member: str, *, why: str) -> None:
        """Record that a process has no session any more; one that was leaving has left."""
        record, found = self._find(job, member)
        state = MemberState.LEFT if found.leaving else MemberState.LOST
        await self._move(record, found, state)
        text = f"{found.node} {'has left' if found.leaving else 'is lost'}: {why}"
        await self._events.add(job, f"member-{state}", text, member=member)

    async def stopped(self, job: str, member: str) -> None:
        """Record that a process was ended by the hub."""
        await self._move(*self._find(job, member), MemberState.STOPPED)

    async def given_up(self, job: str, member: str, *, error: dict[str, str]) -> None:
        """Record that a process failed and is not launched again."""
        record, found = self._find(job, member)
        changes = {"error": error, "failures": MAX_FAILURES}
        await self._move(record, found, MemberState.FAILED, **changes)
        text = f"{found.node}'s worker is not started again: {error.get('what', '')}"
        await self._events.add(job, "member-given-up", text, member=member)

    def reset(self, job: str) -> None:
        """Clear the ends of a resumed job's processes; the caller stores the job's record."""
        for process in self._job(job).processes:
            _check(process, MemberState.STOPPED)
            process.state, process.error, process.failures = MemberState.STOPPED, None, 0
            process.leaving, process.retried, process.in_rounds = False, 0, False

    async def _move(
        self, record: Job, process: Member, state: MemberState, **changes: Any
    ) -> Member:
        _check(process, state)
        process.state = state  # before anything is awaited
        return await self._change(record, process, changes)

    async def _change(self, record: Job, process: Member, changes: dict[str, Any]) -> Member:
        change_fields(process, changes, _FIELDS)
        process.tail = [line[:MAX_TEXT] for line in process.tail[-MAX_TAIL:]]
        if process.error is not None:
            texts = list(process.error.items())[:MAX_TEXTS]
            process.error = {name[:MAX_TEXT]: text[:MAX_TEXT] for name, text in texts}
        await self._save(record)
        return process

    def _find(self, job: str, member: str) -> tuple[Job, Member]:
        record = self._job(job)
        found = record.process(member)
        if found is None:
            raise HubError(
                "the job has no such member",
                given=f"{member!r} of {job}",
                expected="one of " + (", ".join(record.members) or "none yet"),
            )
        return record, found


def next_attempt(
    job: Job, member: str, *, slot: int, node: str, failures: int = 0, retried: int = 0
) -> Member:
    """Return the record of a process that is launched on a node, for the first time or again.

    Raises:
        HubError: the process has started and not ended.
    """
    before = job.process(member)
    if before is not None:
        _check(before, MemberState.ASSIGNED)
    return Member(
        member=member, slot=slot, node=node, attempt=1 if before is None else before.attempt + 1,
        failures=failures, retried=retried, in_rounds=before is not None and before.in_rounds,
    )  # fmt: skip


def _check(process: Member, state: MemberState) -> None:
    if state not in TRANSITIONS[process.state]:
        raise HubError(
            "this state of a member cannot follow",
            given=f"{process.member}: {process.state} -> {state}",
            expected="one of " + ", ".join(sorted(TRANSITIONS[process.state])),
        )
