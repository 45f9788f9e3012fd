"""REST handlers of alarms and of node values."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import HubError
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, body_as, number
from atoll.hub.http.jobs import job_of
from atoll.hub.rounds.node_value import node_value


async def show_node_value(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/worth: what each node adds, and what one more would."""
    stores = context.stores
    return Json(await node_value(stores.jobs, stores.database, job_of(request, context)))


class SilenceRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/alarms/ID/silence."""

    silenced: bool = True
    """False: notify again."""


async def show(request: Request, context: Context) -> Response:
    """GET /api/alarms?all=1&limit=N: open alarms, newest first; `all` includes ended ones."""
    alarms = context.stores.alarms
    if request.query_params.get("all") == "1":
        limit = int(number(request, "limit", 500, low=1, high=5_000))
        return Json(await alarms.all(limit=limit))
    return Json(alarms.open())


async def silence(request: Request, context: Context) -> Response:
    """POST /api/alarms/ID/silence: suppress notifications until the alarm ends."""
    body = await body_as(request, SilenceRequest)
    number_ = request.path_params["alarm"]
    try:
        alarm = await context.stores.alarms.silence(int(number_), silenced=body.silenced)
    except (HubError, ValueError):
        raise HttpRefused(
            404,
            HubError(
                "there is no open alarm with this number", given=str(number_)[:20],
                remedy="`atoll alarms` lists those that are",
            ),
        ) from None  # fmt: skip
    return Json(alarm.view())
