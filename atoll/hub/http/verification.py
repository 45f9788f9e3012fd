"""REST handlers of verified jobs: results of the checks, and states that members upload."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from atoll.errors import ConfigError, HubError
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, identity_of
from atoll.hub.http.jobs import job_of
from atoll.hub.verification.service import VerificationService


async def show(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/verification: members, open challenges, and the newest settled ones."""
    job = job_of(request, context)
    found = context.verification.view(job) if context.verification is not None else None
    if found is None:
        raise HttpRefused(
            404,
            HubError(
                "the rounds of this job are not verified", given=job,
                expected='trust = "audit" in [job]',
            ),
        )  # fmt: skip
    return Json(found)


async def take_state(request: Request, context: Context) -> Response:
    """PUT /api/jobs/J/verification/CHALLENGE/POSITION: hand a state over."""
    service, job, member, number, position = _parts(request, context)
    await service.take_state(job, member, number, position, request.stream())
    return Json({"challenge": number, "position": position}, status_code=201)


async def give_state(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/verification/CHALLENGE/POSITION: the state that a task begins with."""
    service, job, member, number, position = _parts(request, context)
    path = service.state_path(job, member, number, position)
    return FileResponse(path, media_type="application/octet-stream")


def _parts(request: Request, context: Context) -> tuple[VerificationService, str, str, int, int]:
    job, member = job_of(request, context), identity_of(request).member
    service = context.verification
    if service is None or not member:
        raise HubError("only members hand over states", given=job)
    try:
        numbers = [int(request.path_params[name]) for name in ("challenge", "position")]
    except ValueError as error:
        raise ConfigError("this is no number", given=request.url.path[-80:]) from error
    return service, job, member, numbers[0], numbers[1]
