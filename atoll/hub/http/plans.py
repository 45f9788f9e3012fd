"""REST handlers of plans: the best methods and machines for a job."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.config import parse_spec
from atoll.errors import HubError
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, body_as, identity_of
from atoll.hub.http.jobs import job_of
from atoll.hub.planning.planner import Planner


class PlanRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/plan."""

    spec: str
    """A job file."""


async def of_job(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/plan: rank methods and machines for a job, as if it began now."""
    return await _answer(request, context, context.stores.jobs.get(job_of(request, context)).text)


async def of_text(request: Request, context: Context) -> Response:
    """POST /api/plan: the same for a job file that is not stored."""
    body = await body_as(request, PlanRequest)
    parse_spec(body.spec)  # refuses a wrong one before a process is started
    return await _answer(request, context, body.spec)


async def _answer(request: Request, context: Context, spec: str) -> Response:
    planner = _planner(context)
    events = await context.stores.events.tail("", limit=1000)
    found = await planner.ask(
        spec, context.live.nodes(), events=events, hub=context.url, by=identity_of(request)
    )
    return Json(found)


def _planner(context: Context) -> Planner:
    if context.planner is None:
        raise HttpRefused(503, HubError("this hub has not started yet"))
    return context.planner
