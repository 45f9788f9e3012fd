"""Queues over REST: bodies and answers are the wire's own messages as JSON, payloads in base64."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from atoll.hub.auth import may_use_queue
from atoll.hub.context import Context
from atoll.hub.endpoint import Json, body_as, forbidden, identity_of, number
from atoll.wire.messages import (
    Done,
    QueueAck,
    QueueClaim,
    QueueExtend,
    QueueItems,
    QueuePut,
    QueueRelease,
)


def _check(request: Request, queue: str) -> None:
    identity = identity_of(request)
    if not may_use_queue(identity, queue):
        raise forbidden(identity)


async def show_queues(_request: Request, context: Context) -> Response:
    """GET /api/queues: how full each queue is."""
    depths = await context.stores.queue.depths()
    return Json(
        [
            {"queue": name, "ready": d.ready, "leased": d.leased, "dead": d.dead}
            for name, d in sorted(depths.items())
        ]
    )


async def show_dead(request: Request, context: Context) -> Response:
    """GET /api/queues/dead?queue=Q: items that were given back too often."""
    queue = request.query_params.get("queue", "")
    _check(request, queue)
    limit = int(number(request, "limit", 100, low=1, high=1000))
    letters = await context.stores.queue.dead_letters(queue, limit=limit)
    return Json([{name: getattr(d, name) for name in d.__slots__} for d in letters])


async def put(request: Request, context: Context) -> Response:
    """POST /api/queues/put: store an item."""
    body = await body_as(request, QueuePut)
    _check(request, body.queue)
    return Json(await context.stores.queue.put(body.queue, key=body.key, payload=body.payload))


async def claim(request: Request, context: Context) -> Response:
    """POST /api/queues/claim: lease items; `?request=` names the ask."""
    body = await body_as(request, QueueClaim)
    _check(request, body.queue)
    items = await context.stores.queue.claim(
        body.queue,
        lease_s=body.lease_s,
        limit=body.limit,
        wait_s=body.wait_s,
        request=request.query_params.get("request", "")[:200],
    )
    return Json(QueueItems(items))


async def ack(request: Request, context: Context) -> Response:
    """POST /api/queues/ack: an item is done."""
    body = await body_as(request, QueueAck)
    _check(request, body.queue)
    await context.stores.queue.ack(body.queue, lease=body.lease)
    return Json(Done())


async def extend(request: Request, context: Context) -> Response:
    """POST /api/queues/extend: let a lease end later."""
    body = await body_as(request, QueueExtend)
    _check(request, body.queue)
    await context.stores.queue.extend(body.queue, lease=body.lease, lease_s=body.lease_s)
    return Json(Done())


async def release(request: Request, context: Context) -> Response:
    """POST /api/queues/release: give an item back."""
    body = await body_as(request, QueueRelease)
    _check(request, body.queue)
    await context.stores.queue.release(body.queue, lease=body.lease, reason=body.reason)
    return Json(Done())
