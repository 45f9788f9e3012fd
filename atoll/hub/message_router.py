"""Dispatches control messages to the components that handle them.

Every request runs as its own task, so that a waiting one (for a round or a queue item) does not
delay other messages, above all heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from atoll.errors import AtollError, AuthError, HubError, WireError
from atoll.hub.nodes.services import JobServices
from atoll.hub.queues.handlers import QueueAccess, QueueHandlers
from atoll.hub.rounds.recovery import RecoveryCoordinator
from atoll.hub.scheduler.scheduler import Scheduler
from atoll.hub.security.auth import PROGRAM
from atoll.hub.sessions.rejections import RejectionCounts
from atoll.hub.sessions.session import Session
from atoll.hub.tasks import Tasks
from atoll.ids import REDUCER, is_reducer
from atoll.wire.job_messages import FOUND_ROOM, WAITS_FOR_ROOM
from atoll.wire.messages import (
    Acked,
    Beat,
    CheckpointPart,
    CheckpointState,
    Done,
    Drain,
    Envelope,
    Event,
    Failure,
    Finished,
    Leaving,
    LogLines,
    Message,
    Metrics,
    Offering,
    PathAsk,
    PathTrained,
    ProcessState,
    QueuePut,
    QueuePutMany,
    Received,
    Recover,
    Register,
    Roster,
    RoundJoin,
    RoundVote,
    Standing,
    Stop,
    SwarmAnnounce,
    SwarmDone,
    SwarmKept,
    SwarmUnsaved,
    SwarmWant,
    SwarmWatch,
    VerificationAnswer,
    VerificationAsk,
)
from atoll.wire.states import ProcessPhase

logger = logging.getLogger(__name__)

MAX_REQUESTS = 1_000
"""Open requests and notices of one session."""

NOTICES: frozenset[type[Message]] = frozenset({Event, Received})
"""Messages that may come without a request number; all others have an answer."""

REPORTS: frozenset[type[Message]] = frozenset({LogLines, Metrics, Event})
"""Stored one at a time per session: a transaction with all reports of one session would delay the
votes of others."""

Handler = Callable[[Session, Any, int], Awaitable[Message]]

Immediate = Callable[[Session, Envelope], bool]
"""Handles a message at once if it can; returns False to leave it to its `Handler`."""


class MessageRouter:
    """Table of handlers by message type."""

    def __init__(
        self,
        services: JobServices,
        *,
        scheduler: Scheduler,
        recovery: RecoveryCoordinator,
        rejections: RejectionCounts,
        tasks: Tasks,
    ) -> None:
        self._stores = stores = services.stores
        self._jobs = stores.jobs
        self._membership = services.membership
        self._rounds, self._checkpoints = services.rounds, services.checkpoints
        self._swarm, self._paths = services.swarm, services.paths
        self._verification = services.verification
        self._scheduler = scheduler
        self._recovery = recovery
        self._rejections = rejections
        self._tasks = tasks
        queues = self.queues = QueueHandlers(stores.queue, access=QueueAccess(stores.jobs))
        # The most frequent messages of a busy hub: creating a task costs more than handling them.
        self._immediate: dict[type[Message], Immediate] = {
            QueuePut: queues.put_now,
            QueuePutMany: queues.put_now,
        }
        # A claim of an ended session is withdrawn. What a process did is handled to the end, even
        # while a full disk delays it: half of a plan or verdict would leave the others waiting.
        self._cancelled = frozenset(queues.handlers)
        self._handlers: dict[type[Message], Handler] = {
            **queues.handlers,
            LogLines: self._log_lines,
            Metrics: self._metrics,
            Event: self._event,
            ProcessState: self._process_state,
            Finished: self._finished,
            Register: self._register,
            Roster: self._roster,
            RoundJoin: self._round_join,
            RoundVote: self._round_vote,
            Recover: self._recover,
            Standing: self._standing,
            Leaving: self._leaving,
            Drain: self._drain,
            Offering: self._offering,
            CheckpointPart: self._checkpoint_part,
            Stop: self._stop,
            SwarmAnnounce: self._swarm_announce,
            SwarmWant: self._swarm_want,
            SwarmDone: self._swarm_done,
            SwarmKept: self._swarm_kept,
            SwarmUnsaved: self._swarm_unsaved,
            SwarmWatch: self._swarm_watch,
            PathAsk: self._path_ask,
            PathTrained: self._path_trained,
            Received: self._received,
            VerificationAsk: self._verification_ask,
            VerificationAnswer: self._verification_answer,
        }

    def received(self, session: Session, envelope: Envelope) -> None:
        """Start handling a message; raises WireError if it is not accepted."""
        body, id = envelope.body, envelope.id
        if isinstance(body, Beat):
            self._beat(session, envelope, body)
            return
        handler = self._handlers.get(type(body))
        if handler is None or envelope.reply:
            raise WireError("a hub takes no such message", given=type(body).__name__)
        if session.identity.role == PROGRAM and type(body) not in self._cancelled:
            raise WireError("a program uses queues only", given=type(body).__name__)
        if id and id in session.requests:
            return
        if not id and type(body) not in NOTICES:
            raise WireError(
                "a request without a number", given=f"{type(body).__name__}, id 0",
                expected="an id above 0, by which its answer is found",
            )  # fmt: skip
        if len(session.requests) + session.notices >= MAX_REQUESTS:
            raise WireError("too many open requests", expected=f"at most {MAX_REQUESTS}")
        immediate = self._immediate.get(type(body))
        if immediate is not None and immediate(session, envelope):
            return
        name = f"{type(body).__name__} of {session.address}"
        task = self._tasks.start(self._run(session, envelope, handler), name=name)
        if id:
            cancelled = type(body) in self._cancelled
            session.requests[id] = task if cancelled else asyncio.shield(task)
        else:
            session.notices += 1

    def _beat(self, session: Session, envelope: Envelope, body: Beat) -> None:
        """Take a heartbeat, even from a session with too many open requests."""
        session.stats = body.stats
        session.clock.note(body.time, session.last_seen)
        if envelope.id:
            session.answer(envelope, Done())

    async def _run(self, session: Session, envelope: Envelope, handler: Handler) -> None:
        refusal: AtollError | None = None
        try:
            if type(envelope.body) in REPORTS:
                async with session.turn:
                    answer = await handler(session, envelope.body, envelope.id)
            else:
                answer = await handler(session, envelope.body, envelope.id)
        except AtollError as error:
            logger.info("%s: %s", session.address, error)
            answer, refusal = Failure(error.to_dict()), error
        except OverflowError as error:
            wrong = WireError(
                "a number of this message is out of range",
                given=f"{type(envelope.body).__name__} ({error})",
                expected="whole numbers between -2^63 and 2^63 - 1",
            )
            answer = Failure(wrong.to_dict())
        except Exception as error:
            logger.exception("%s of %s failed", type(envelope.body).__name__, session.address)
            what, remedy = "the hub failed on this request", "see the hub's log"
            answer = Failure(HubError(what, given=repr(error), remedy=remedy).to_dict())
        finally:
            if envelope.id:
                session.requests.pop(envelope.id, None)
            else:
                session.notices -= 1
        if envelope.id:
            session.answer(envelope, answer)
        if refusal is not None:  # after the answer, which must not depend on the disk
            await self._rejections.note(session, envelope.body, refusal)

    # --------------------------------------------------------------------- reports of nodes

    async def _log_lines(self, session: Session, body: LogLines, id: int) -> Message:
        if not self._jobs.knows(body.job):
            return Acked(body.seq + len(body.lines) - 1)  # deleted: the lines are not needed
        self._check_process(session, body.job, body.member)
        seq = await self._stores.logs.add(
            body.job, body.member, source=session.incarnation, seq=body.seq, lines=body.lines
        )
        return Acked(seq)

    async def _process_state(self, session: Session, body: ProcessState, id: int) -> Message:
        identity = session.identity
        own = identity.name == body.job and identity.member in ("", body.member)
        if identity.role == "job" and not own:
            raise AuthError("this process belongs to another", given=f"{body.job}/{body.member}")
        if not self._jobs.knows(body.job):
            return Done()  # deleted: the report is not needed, and must not come again
        node = identity.name if identity.role == "node" else ""
        if node and is_reducer(body.member):
            self._check_process(session, body.job, body.member)
        if is_reducer(body.member) and body.state == ProcessPhase.EXITED:
            self._scheduler.reducers.exited(body.job, body.member, body.attempt)
        await self._membership.process_state(node, body)
        return Done()

    def _check_process(self, session: Session, job: str, member: str) -> None:
        """Reject a report about a process that the sender does not own."""
        identity = session.identity
        own = identity.name == job and identity.member in ("", member)
        if identity.role == "operator" or (identity.role == "job" and own):
            return
        record = self._jobs.get(job).process(member)
        owner = record.node if record is not None else ""
        if is_reducer(member):  # after a restart of the hub its node is unknown
            owner = self._scheduler.reducers.where(job, member) or identity.name
        if identity.role != "node" or owner != identity.name:
            raise AuthError("this process belongs to another", given=f"{job}/{member}")

    # ------------------------------------------------------------------ requests of members

    async def _metrics(self, session: Session, body: Metrics, id: int) -> Message:
        job, member = _member(session)
        record = self._jobs.get(job).process(member)
        seq = await self._stores.metrics.add(
            job,
            member,
            incarnation=body.incarnation,
            seq=body.seq,
            points=body.points,
            node=record.node if record is not None else "",
        )
        return Acked(seq)

    async def _event(self, session: Session, body: Event, id: int) -> Message:
        if session.job:
            record = self._jobs.get(session.job)
            if body.kind == WAITS_FOR_ROOM:
                if session.member in record.without_room:
                    return Done()  # it says so at every try
                record.without_room.add(session.member)
            elif body.kind == FOUND_ROOM:
                record.without_room.discard(session.member)
        await self._stores.events.add(
            session.job, body.kind, body.text, member=session.member or session.address,
            fields=body.fields,
        )  # fmt: skip
        return Done()

    async def _finished(self, session: Session, body: Finished, id: int) -> Message:
        _member(session)
        await self._membership.finished(session, body)
        return Done()

    async def _register(self, session: Session, body: Register, id: int) -> Message:
        _member(session)
        registered = await self._membership.register(session, body)
        key = self._stores.auth.key_of_members(session.job)
        return msgspec.structs.replace(registered, key=key)

    async def _roster(self, session: Session, body: Roster, id: int) -> Message:
        job, _ = _member(session)
        return self._membership.roster(job)

    async def _round_join(self, session: Session, body: RoundJoin, id: int) -> Message:
        return await self._rounds.join(*self._participant(session), body)

    async def _round_vote(self, session: Session, body: RoundVote, id: int) -> Message:
        return await self._rounds.vote(*self._member_of_job(session), body)

    async def _recover(self, session: Session, body: Recover, id: int) -> Message:
        return await self._recovery.recover(*self._participant(session), body)

    async def _standing(self, session: Session, body: Standing, id: int) -> Message:
        await self._recovery.standing(*self._member_of_job(session), body)
        return Done()

    async def _leaving(self, session: Session, body: Leaving, id: int) -> Message:
        self._member_of_job(session)
        await self._membership.leaving(session, body)
        return Done()

    async def _drain(self, session: Session, body: Drain, id: int) -> Message:
        await self._membership.drain(session, body)
        return Done()

    async def _offering(self, session: Session, body: Offering, id: int) -> Message:
        await self._membership.offering(session, body)
        return Done()

    async def _checkpoint_part(self, session: Session, body: CheckpointPart, id: int) -> Message:
        return CheckpointState(await self._checkpoints.deliver(*self._member_of_job(session), body))

    async def _swarm_announce(self, session: Session, body: SwarmAnnounce, id: int) -> Message:
        job, member = self._member_of_job(session)
        place = await self._swarm.announce(job, member, body)
        if not place.epoch:  # it holds the whole model, and comes late
            await self._recovery.wait_for(job, member)
        return place

    async def _swarm_want(self, session: Session, body: SwarmWant, id: int) -> Message:
        return await self._swarm.want(*self._member_of_job(session), body)

    async def _swarm_done(self, session: Session, body: SwarmDone, id: int) -> Message:
        job, _ = self._member_of_job(session)
        await self._swarm.done(job, body)
        return Done()

    async def _swarm_kept(self, session: Session, body: SwarmKept, id: int) -> Message:
        return await self._swarm.kept(*self._member_of_job(session), body)

    async def _swarm_unsaved(self, session: Session, body: SwarmUnsaved, id: int) -> Message:
        await self._swarm.unsaved(*self._member_of_job(session), body)
        return Done()

    async def _swarm_watch(self, session: Session, body: SwarmWatch, id: int) -> Message:
        return await self._swarm.watch(*self._member_of_job(session), body)

    async def _path_ask(self, session: Session, body: PathAsk, id: int) -> Message:
        return await self._paths.ask(*self._participant(session), body)

    async def _path_trained(self, session: Session, body: PathTrained, id: int) -> Message:
        return await self._paths.trained(*self._member_of_job(session), body)

    async def _received(self, session: Session, body: Received, id: int) -> Message:
        if not session.job or session.member != REDUCER:
            raise AuthError("only the reducer of a job may report this", given=session.address)
        self._verification.received(session.job, body)
        return Done()

    async def _verification_ask(self, session: Session, body: VerificationAsk, id: int) -> Message:
        return self._verification.ask(*self._member_of_job(session), body)

    async def _verification_answer(
        self, session: Session, body: VerificationAnswer, id: int
    ) -> Message:
        await self._verification.answer(*self._member_of_job(session), body)
        return Done()

    def _participant(self, session: Session) -> tuple[str, str]:
        """Return job and member, and note that the member takes part in rounds."""
        job, member = self._member_of_job(session)
        self._jobs.members.takes_part(job, member)
        return job, member

    def _member_of_job(self, session: Session) -> tuple[str, str]:
        job, member = _member(session)
        if member not in self._jobs.get(job).members:
            raise AuthError("only members of a job may ask this", given=session.address)
        return job, member

    async def _stop(self, session: Session, body: Stop, id: int) -> Message:
        if session.identity.role != "operator" and session.job != body.job:
            raise AuthError("only its own members may stop a job", given=body.job)
        await self._scheduler.stop(body.job, grace_s=body.grace_s)
        return Done()


def _member(session: Session) -> tuple[str, str]:
    """Return job and member of a session; nodes have none."""
    if not session.job:
        raise AuthError("only members of a job may ask this", given=session.address)
    return session.job, session.member
