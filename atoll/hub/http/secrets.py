"""REST handlers of secrets: set, list and delete them; give them to processes of jobs."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.config.redaction import split_secret
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import Json, body_as, identity_of
from atoll.hub.http.jobs import job_of


class SecretValue(msgspec.Struct, frozen=True):
    """Body of PUT /api/secrets/NAME."""

    value: str


async def show(_request: Request, context: Context) -> Response:
    """GET /api/secrets: names, when they were changed and by whom."""
    return Json(await context.stores.secrets.listing())


async def store(request: Request, context: Context) -> Response:
    """PUT /api/secrets/NAME: store a secret, or replace it."""
    body = await body_as(request, SecretValue)
    name = request.path_params["name"]
    await context.stores.secrets.set(name, body.value, by=identity_of(request).name)
    return Json({"name": name})


async def remove(request: Request, context: Context) -> Response:
    """DELETE /api/secrets/NAME: delete a secret."""
    name = request.path_params["name"]
    await context.stores.secrets.remove(name)
    return Json({"name": name})


async def give(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/secrets: the values that a job uses, by name, for its own processes."""
    job = context.stores.jobs.get(job_of(request, context))
    names = {name for _, name in map(split_secret, job.spec.launch.secrets)}
    return Json(await context.stores.secrets.values(sorted(names)))
