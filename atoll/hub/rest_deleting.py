"""Deleting jobs over REST, and what would go with one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import HubError
from atoll.hub.context import Context, Deletes
from atoll.hub.endpoint import Json, Refused, identity_of
from atoll.hub.rest_jobs import job_of


async def delete_job(request: Request, context: Context) -> Response:
    """DELETE /api/jobs/J?keep_files=1: a job that has ended, and all that is left of it."""
    job = job_of(request, context)
    keep = request.query_params.get("keep_files") == "1"
    identity = identity_of(request)
    by = f"{identity.role} {identity.name}" if identity.name != identity.role else identity.role
    return Json(await _deletions(context).delete(job, keep_files=keep, by=by))


async def show_size(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/size: what would go with a job, in files, items and bytes."""
    return Json(await _deletions(context).size(job_of(request, context)))


def _deletions(context: Context) -> Deletes:
    if context.deletions is None:
        raise Refused(503, HubError("this hub is not up yet"))
    return context.deletions
