"""Blobs over REST: sent, asked for and fetched by their hash, which is all that opens one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from atoll.errors import HubError
from atoll.hub.blobs import MAX_BLOB_BYTES
from atoll.hub.context import Context
from atoll.hub.endpoint import Json, Refused


async def put_blob(request: Request, context: Context) -> Response:
    """PUT /api/blobs/SHA256: stream a blob to disk; what hashes to something else is refused."""
    sha256 = str(request.path_params["sha256"])
    nbytes = await context.stores.blobs.put(sha256, request.stream(), max_bytes=MAX_BLOB_BYTES)
    return Json({"sha256": sha256, "nbytes": nbytes}, status_code=201)


async def get_blob(request: Request, context: Context) -> Response:
    """GET or HEAD /api/blobs/SHA256: stream a blob; ranges work."""
    sha256, blobs = str(request.path_params["sha256"]), context.stores.blobs
    if not await asyncio.to_thread(blobs.has, sha256):
        raise Refused(404, HubError("the hub does not have this blob", given=sha256))
    headers = {"x-sha256": sha256, "x-content-type-options": "nosniff"}
    path = blobs.path(sha256)
    return FileResponse(path, headers=headers, media_type="application/octet-stream")
