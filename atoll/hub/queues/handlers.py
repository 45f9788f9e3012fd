"""Handlers of queue and topic messages on WebSocket sessions, with access checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from atoll.errors import AtollError, AuthError, HubError
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.queues.backend import INTERNAL, Stored
from atoll.hub.queues.queues import Queues
from atoll.hub.security.auth import Identity
from atoll.hub.security.queue_rights import may_use_queue
from atoll.hub.sessions.session import Session
from atoll.ids import is_job_id
from atoll.wire.messages import (
    Done,
    Envelope,
    Failure,
    Message,
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueEntry,
    QueueExtend,
    QueueExtendMany,
    QueueItems,
    QueueLost,
    QueueOpen,
    QueuePut,
    QueuePutDone,
    QueuePutMany,
    QueuePutManyDone,
    QueueRelease,
    TopicAck,
    TopicPublish,
    TopicRead,
)

logger = logging.getLogger(__name__)


class Asker(Protocol):
    """The sender of a request: a session, or a JSON socket."""

    @property
    def identity(self) -> Identity:
        """The owner of its token."""
        ...

    @property
    def address(self) -> str:
        """Names it in logs."""
        ...

    @property
    def incarnation(self) -> str:
        """Distinguishes it from others of the same address."""
        ...


Handler = Callable[[Any, Any, int], Awaitable[Message]]


class QueueAccess:
    """Decides which token may use which queues and topics."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def check(self, identity: Identity, queue: str) -> None:
        """Check that a token may use this queue or topic; raises AuthError."""
        if may_use_queue(identity, queue):
            self._check_shared(identity, queue)
            return
        if may_use_queue(identity, queue, shared=self._listed(identity)):
            return
        if identity.queues:
            raise AuthError(
                "this program's ticket permits other queues and topics", given=queue,
                expected=", ".join(f"{scope}/..." for scope in identity.queues),
                remedy="a name below one of these, or another ticket: atoll ticket new --role "
                "program --queues NAME",
            )  # fmt: skip
        raise AuthError(
            "this token may not use this queue",
            given=queue,
            expected=f"a queue of {identity.role} {identity.name}",
            remedy="list it in `queues` of [job] in the job file",
        )

    def check_options(self, identity: Identity, queue: str) -> None:
        """Check that a token may set options; raises like `check`."""
        self.check(identity, queue)
        if queue.startswith(INTERNAL):
            raise AuthError("the hub's own queues have no options", given=queue)

    def _check_shared(self, identity: Identity, queue: str) -> None:
        """Refuse a program the queues of a job; shared queues, which jobs list, have other names.

        This includes jobs that do not exist yet: their ids are predictable, and a program that puts
        or claims early would be first in the queue of such a job.
        """
        first = queue.partition("/")[0]
        if identity.role == "program" and (is_job_id(first) or self._jobs.knows(first)):
            raise AuthError(
                "a program may not use the queues of a job", given=queue,
                expected="a name that jobs share, e.g. pool/experience",
                remedy="list that name in `queues` of [job] in the job file",
            )  # fmt: skip

    def _listed(self, identity: Identity) -> frozenset[str]:
        if identity.role != "job":
            return frozenset()
        job = self._jobs.find(identity.name)
        return frozenset(job.spec.job.queues) if job is not None else frozenset()


class QueueHandlers:
    """The handlers of all messages about queues and topics."""

    def __init__(self, queues: Queues, *, access: QueueAccess) -> None:
        self._queues = queues
        self._access = access
        self.handlers: dict[type[Message], Handler] = {
            QueueOpen: self._open,
            QueuePut: self._put,
            QueuePutMany: self._put_many,
            QueueClaim: self._claim,
            QueueAck: self._ack,
            QueueAckMany: self._ack_many,
            QueueExtend: self._extend,
            QueueExtendMany: self._extend_many,
            QueueRelease: self._release,
            TopicPublish: self._publish,
            TopicRead: self._read,
            TopicAck: self._topic_ack,
        }

    def put_now(self, session: Session, envelope: Envelope) -> bool:
        """Store items without creating a task, if there is space now; else return False.

        A fast path for thousands of producers; other cases, also errors, take the normal one.
        """
        body, id = envelope.body, envelope.id
        if not isinstance(body, QueuePut | QueuePutMany) or not id:
            return False
        entries = (
            [QueueEntry(body.key, body.payload, body.blob)]
            if isinstance(body, QueuePut)
            else body.items
        )
        try:
            self._access.check(session.identity, body.queue)
            stored = self._queues.put_now(body.queue, entries)
        except AtollError:
            return False
        if stored is None:
            return False

        def answer(done: asyncio.Future[Stored]) -> None:
            session.requests.pop(id, None)
            if not done.cancelled():
                session.answer(envelope, _answer_to(body, done))

        session.requests[id] = stored
        stored.add_done_callback(answer)
        return True

    async def _open(self, session: Asker, body: QueueOpen, id: int) -> Message:
        self._access.check_options(session.identity, body.queue)
        await self._queues.declare(body.queue, body.options, topic=body.topic)
        return Done()

    async def _put(self, session: Asker, body: QueuePut, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        return await self._queues.put(
            body.queue, key=body.key, payload=body.payload, blob=body.blob, wait_s=body.wait_s
        )

    async def _put_many(self, session: Asker, body: QueuePutMany, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        return await self._queues.put_many(body.queue, body.items, wait_s=body.wait_s)

    async def _claim(self, session: Asker, body: QueueClaim, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        items = await self._queues.claim(
            body.queue,
            lease_s=body.lease_s,
            limit=body.limit,
            wait_s=body.wait_s,
            request=f"{session.address}/{session.incarnation}/{id}",
        )
        return QueueItems(items)

    async def _ack(self, session: Asker, body: QueueAck, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        await self._queues.ack(body.queue, lease=body.lease)
        return Done()

    async def _ack_many(self, session: Asker, body: QueueAckMany, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        return QueueLost(await self._queues.ack_many(body.queue, body.leases))

    async def _extend(self, session: Asker, body: QueueExtend, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        await self._queues.extend(body.queue, lease=body.lease, lease_s=body.lease_s)
        return Done()

    async def _extend_many(self, session: Asker, body: QueueExtendMany, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        lost = await self._queues.extend_many(body.queue, body.leases, lease_s=body.lease_s)
        return QueueLost(lost)

    async def _release(self, session: Asker, body: QueueRelease, id: int) -> Message:
        self._access.check(session.identity, body.queue)
        await self._queues.release(body.queue, lease=body.lease, reason=body.reason)
        return Done()

    async def _publish(self, session: Asker, body: TopicPublish, id: int) -> Message:
        self._access.check(session.identity, body.topic)
        return await self._queues.topics.publish(body.topic, body.items)

    async def _read(self, session: Asker, body: TopicRead, id: int) -> Message:
        self._access.check(session.identity, body.topic)
        return await self._queues.topics.read(
            body.topic,
            body.subscription,
            after=body.after,
            limit=body.limit,
            wait_s=body.wait_s,
            start=body.start,
        )

    async def _topic_ack(self, session: Asker, body: TopicAck, id: int) -> Message:
        self._access.check(session.identity, body.topic)
        await self._queues.topics.ack(body.topic, body.subscription, seq=body.seq)
        return Done()


def _answer_to(body: QueuePut | QueuePutMany, done: asyncio.Future[Stored]) -> Message:
    error = done.exception()
    if isinstance(error, AtollError):
        return Failure(error.to_dict())
    if error is not None:
        logger.error("a put failed", exc_info=error)
        what = "the hub failed on this request"
        return Failure(HubError(what, given=repr(error), remedy="see the hub's log").to_dict())
    stored = done.result()
    if isinstance(body, QueuePut):
        return QueuePutDone(stored.seqs[0], bool(stored.duplicates))
    return QueuePutManyDone(stored.seqs, stored.duplicates)
