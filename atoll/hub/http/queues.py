"""REST handlers of queues: the messages of the wire as JSON, payloads in base64."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import AuthError
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, body_as, identity_of, number
from atoll.hub.queues.handlers import QueueAccess
from atoll.hub.queues.json_messages import message_of, shown
from atoll.wire.messages import (
    Done,
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueExtend,
    QueueItems,
    QueueLost,
    QueueOpen,
    QueuePut,
    QueuePutMany,
    QueueRelease,
    TopicAck,
    TopicPublish,
    TopicRead,
)


class DeadLetters(msgspec.Struct, frozen=True):
    """Selects one dead letter, or all of the queue."""

    queue: str
    seq: int | None = None


def _check(request: Request, context: Context, queue: str, *, options: bool = False) -> None:
    access, identity = QueueAccess(context.stores.jobs), identity_of(request)
    try:
        if options:
            access.check_options(identity, queue)
        else:
            access.check(identity, queue)
    except AuthError as error:
        raise HttpRefused(403, error) from error


async def queue_rows(context: Context) -> list[dict[str, Any]]:
    """Return a summary of each queue and topic; its cost does not depend on the stored items."""
    return await context.stores.queue.rows()


async def show_queues(_request: Request, context: Context) -> Response:
    """GET /api/queues: fill and throughput of each queue."""
    return Json(await queue_rows(context))


async def show_dead(request: Request, context: Context) -> Response:
    """GET /api/queues/dead?queue=Q: items that were released too often."""
    queue = request.query_params.get("queue", "")
    if identity_of(request).role != "viewer":
        _check(request, context, queue)
    limit = int(number(request, "limit", 100, low=1, high=1000))
    letters = await context.stores.queue.dead_letters(queue, limit=limit)
    return Json([{name: getattr(d, name) for name in d.__slots__} for d in letters])


async def requeue(request: Request, context: Context) -> Response:
    """POST /api/queues/requeue: make a dead letter (no `seq`: all) ready again."""
    body = await body_as(request, DeadLetters)
    seqs = None if body.seq is None else [body.seq]
    return Json({"items": await context.stores.queue.requeue(body.queue, seqs)})


async def discard(request: Request, context: Context) -> Response:
    """POST /api/queues/discard: delete a dead letter (no `seq`: all)."""
    body = await body_as(request, DeadLetters)
    seqs = None if body.seq is None else [body.seq]
    return Json({"items": await context.stores.queue.discard(body.queue, seqs)})


async def declare(request: Request, context: Context) -> Response:
    """POST /api/queues/open: set the options of a queue or topic."""
    body = await body_as(request, QueueOpen)
    _check(request, context, body.queue, options=True)
    await context.stores.queue.declare(body.queue, body.options, topic=body.topic)
    return Json(Done())


async def put(request: Request, context: Context) -> Response:
    """POST /api/queues/put: store an item."""
    body = message_of(await request.body(), QueuePut)
    _check(request, context, body.queue)
    done = await context.stores.queue.put(
        body.queue, key=body.key, payload=body.payload, blob=body.blob, wait_s=body.wait_s
    )
    return Json(done)


async def put_many(request: Request, context: Context) -> Response:
    """POST /api/queues/put_many: store items, all or none."""
    body = message_of(await request.body(), QueuePutMany)
    _check(request, context, body.queue)
    queue = context.stores.queue
    return Json(await queue.put_many(body.queue, body.items, wait_s=body.wait_s))


async def claim(request: Request, context: Context) -> Response:
    """POST /api/queues/claim: lease items; `?request=` is an idempotency key."""
    body = message_of(await request.body(), QueueClaim)
    _check(request, context, body.queue)
    items = await context.stores.queue.claim(
        body.queue,
        lease_s=body.lease_s,
        limit=body.limit,
        wait_s=body.wait_s,
        request=request.query_params.get("request", "")[:200],
    )
    return Json(shown(QueueItems(items)))


async def ack(request: Request, context: Context) -> Response:
    """POST /api/queues/ack: acknowledge an item."""
    body = await body_as(request, QueueAck)
    _check(request, context, body.queue)
    await context.stores.queue.ack(body.queue, lease=body.lease)
    return Json(Done())


async def ack_many(request: Request, context: Context) -> Response:
    """POST /api/queues/ack_many: acknowledge items; returns the lost leases."""
    body = await body_as(request, QueueAckMany)
    _check(request, context, body.queue)
    return Json(QueueLost(await context.stores.queue.ack_many(body.queue, body.leases)))


async def extend(request: Request, context: Context) -> Response:
    """POST /api/queues/extend: extend a lease."""
    body = await body_as(request, QueueExtend)
    _check(request, context, body.queue)
    await context.stores.queue.extend(body.queue, lease=body.lease, lease_s=body.lease_s)
    return Json(Done())


async def release(request: Request, context: Context) -> Response:
    """POST /api/queues/release: return an item to the queue."""
    body = await body_as(request, QueueRelease)
    _check(request, context, body.queue)
    await context.stores.queue.release(body.queue, lease=body.lease, reason=body.reason)
    return Json(Done())


async def publish(request: Request, context: Context) -> Response:
    """POST /api/topics/publish: append items to a topic."""
    body = message_of(await request.body(), TopicPublish)
    _check(request, context, body.topic)
    return Json(await context.stores.queue.topics.publish(body.topic, body.items))


async def read(request: Request, context: Context) -> Response:
    """POST /api/topics/read: items of a topic after a position."""
    body = await body_as(request, TopicRead)
    _check(request, context, body.topic)
    found = await context.stores.queue.topics.read(
        body.topic,
        body.subscription,
        after=body.after,
        limit=body.limit,
        wait_s=body.wait_s,
        start=body.start,
    )
    return Json(shown(found))


async def acknowledge(request: Request, context: Context) -> Response:
    """POST /api/topics/ack: acknowledge everything up to a number for a subscription."""
    body = await body_as(request, TopicAck)
    _check(request, context, body.topic)
    await context.stores.queue.topics.ack(body.topic, body.subscription, seq=body.seq)
    return Json(Done())
