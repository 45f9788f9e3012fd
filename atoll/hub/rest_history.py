"""The past over REST: figures of nodes and members in buckets, and a job's curves at once."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import ConfigError, HubError
from atoll.hub.context import Context
from atoll.hub.endpoint import Json, Refused, number
from atoll.hub.history import HOUR_S

MAX_POINTS = 2_000


async def read(request: Request, context: Context) -> Response:
    """GET /api/history: `owner=O&from=T&to=T&points=N` for buckets, or `job=J&points=N`.

    `owner` is `node/NAME` or `JOB/MEMBER`; times are seconds since 1970, by default the last hour.
    With `job` the answer is like that of the job's metrics, thinned to so many points of a member;
    `last` is where a reader goes on.
    """
    points = int(number(request, "points", 300, low=2, high=MAX_POINTS))
    job, owner = request.query_params.get("job", ""), request.query_params.get("owner", "")
    if job:
        return await _curves(context, job, points)
    if not owner:
        raise ConfigError(
            "history of whom?", given="no owner", expected="owner=node/NAME, owner=JOB/w0 or job=J"
        )
    until = number(request, "to", context.clock.wall())
    since = number(request, "from", until - HOUR_S)
    found = await context.stores.history.read(owner, since=since, until=until, points=points)
    return Json(found | {"from": since, "to": until})


async def _curves(context: Context, job: str, points: int) -> Response:
    if not context.stores.jobs.knows(job):
        raise Refused(404, HubError("there is no such job", given=repr(job[:100])))
    found = await context.stores.metrics.curves(job, points=points)
    return Json({"last": found[-1]["id"] if found else 0, "points": found})
