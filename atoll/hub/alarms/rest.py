"""Alarms over REST: look, and silence; and what machines are worth."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import HubError
from atoll.hub.alarms.node_value import node_value
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, body_as, number
from atoll.hub.http.jobs import job_of


async def show_node_value(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/worth: what each machine brings, and what one more would."""
    return Json(await node_value(context, job_of(request, context)))


class SilenceAsked(msgspec.Struct, frozen=True):
    """Body of a wish about an alarm."""

    silenced: bool = True
    """False: it is told again."""


async def show(request: Request, context: Context) -> Response:
    """GET /api/alarms?all=1&limit=N: what is wrong, the newest first; `all`: also what was."""
    alarms = context.stores.alarms
    if request.query_params.get("all") == "1":
        limit = int(number(request, "limit", 500, low=1, high=5_000))
        return Json(await alarms.all(limit=limit))
    return Json(alarms.open())


async def silence(request: Request, context: Context) -> Response:
    """POST /api/alarms/ID/silence: nobody is told of it any more until it ends."""
    body = await body_as(request, SilenceAsked)
    number_ = request.path_params["alarm"]
    try:
        alarm = await context.stores.alarms.silence(int(number_), silenced=body.silenced)
    except (HubError, ValueError):
        raise HttpRefused(
            404,
            HubError(
                "no such alarm is open", given=str(number_)[:20],
                remedy="`atoll alarms` lists those that are",
            ),
        ) from None  # fmt: skip
    return Json(alarm.view())
