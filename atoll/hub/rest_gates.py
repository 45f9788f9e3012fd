"""The gates of islands over REST: for the processes of the island itself, and nobody else."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import ConfigError, HubError
from atoll.hub.context import Context
from atoll.hub.endpoint import Json, Refused, body_as, forbidden, identity_of
from atoll.hub.rest_jobs import job_of
from atoll.ids import is_hand, member_of_hand
from atoll.wire.messages import Gate

LONGEST = 255
"""Characters of an address, and of a secret."""


async def open_gate(request: Request, context: Context) -> Response:
    """PUT /api/jobs/J/gates/M: the first machine of member M's island awaits its hands there."""
    job, member = job_of(request, context), _member_of(request)
    asking, record = identity_of(request), context.stores.jobs.get(job)
    newest = record.members.get(member)
    if asking.member != member or (newest is not None and asking.attempt < newest.attempt):
        raise forbidden(asking)
    if record.state != "running":
        raise HubError("the job does not run", given=job, expected="a member of a running job")
    gate = await body_as(request, Gate)
    if not 0 < len(gate.dial) <= LONGEST or not 0 < len(gate.secret) <= LONGEST:
        raise ConfigError(
            "this is no gate",
            given=f"dial of {len(gate.dial)} and secret of {len(gate.secret)} characters",
            expected=f"1 to {LONGEST} of each",
        )
    context.gates.open(job, member, gate)
    return Json({})


async def show_gate(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/gates/M: where the hands of member M's island find its first machine."""
    job, member = job_of(request, context), _member_of(request)
    asking = identity_of(request).member
    if member != (member_of_hand(asking)[0] if is_hand(asking) else asking):
        raise forbidden(identity_of(request))
    gate = context.gates.get(job, member)
    if gate is None:
        raise Refused(404, HubError("this island has opened no gate", given=f"{job}/{member}"))
    return Json(gate)


def _member_of(request: Request) -> str:
    member: str = request.path_params["member"]
    return member
