"""GET /metrics: the hub's figures for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from atoll.hub.context import Context
from atoll.hub.families import families
from atoll.hub.prometheus import CONTENT_TYPE, render


async def show(_request: Request, context: Context) -> Response:
    """GET /metrics: every figure of this moment."""
    text = render(await families(context))
    return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})
