"""REST handlers of job files, blobs, and the speed test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from email.utils import formatdate

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from atoll.errors import AuthError, HubError
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, identity_of, number
from atoll.hub.http.jobs import job_of, text_for_viewers
from atoll.hub.http.middleware import MAX_SPEED_BYTES
from atoll.hub.jobs.record import code_of
from atoll.hub.paths.service import RECORD_NAME as PATHS_RECORD
from atoll.hub.quotas.ledger import Holder
from atoll.hub.storage.blobs import MAX_BLOB_BYTES
from atoll.hub.storage.files import ARTIFACTS, is_log, plain
from atoll.hub.verification.service import COMMITMENTS_NAME
from atoll.hub.verification.service import FOLDER as STATES
from atoll.hub.verification.service import RECORD_NAME as VERIFICATION_RECORD
from atoll.wire.manifest import (
    MANIFEST_NAME,
    SHARED_PART,
    checkpoint_folder,
    member_part,
    piece_file,
)

_BLOCK = bytes(64 * 1024)

_ROUNDS = checkpoint_folder(0).removesuffix("000000")
"""Beginning of the names of all checkpoints."""

_RECORDS = frozenset(("job.toml", PATHS_RECORD, VERIFICATION_RECORD))
"""Files besides logs and manifests that only the hub writes."""

_UNREAD = frozenset((COMMITMENTS_NAME, VERIFICATION_RECORD))
"""Files that members do not read: a checker could copy the digests that it is to find."""


async def put_file(request: Request, context: Context) -> Response:
    """PUT /api/jobs/J/files/PATH: store a file; `X-Sha256` is checked."""
    job, name = job_of(request, context), str(request.path_params["path"])
    compared = plain(name)
    manifest = compared.rpartition("/")[2] == MANIFEST_NAME and not compared.startswith(ARTIFACTS)
    if compared in _RECORDS or manifest or is_log(name):
        raise HttpRefused(403, AuthError("only the hub writes this file", given=name))
    if compared.startswith(f"{STATES}/"):
        raise HttpRefused(403, AuthError("states of a verification go another way", given=name))
    identity = identity_of(request)
    if identity.member and not _written_by(identity.member, context, job, compared):
        raise HttpRefused(
            403,
            AuthError(
                "a member does not write the artifacts and parts of others",
                given=f"{identity.member}: {name}",
                expected="its own part of a checkpoint, a shared one, or a file of another name",
            ),
        )
    if identity.role == "node" and not _left_by(identity.name, context, job, name):
        raise HttpRefused(
            403,
            AuthError(
                "a node writes the artifacts of its own processes only",
                given=f"{name} of {job}",
                expected="artifacts/MEMBER/PATH of a member that is placed on it",
            ),
        )
    sha256 = request.headers.get("x-sha256", "")
    info = await context.stores.files.put(
        job, name, request.stream(), sha256=sha256, announced=announced_bytes(request)
    )
    return Json(info, status_code=201)


def announced_bytes(request: Request) -> int:
    """Return the declared size of the body of a request; 0: none is declared."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _written_by(member: str, context: Context, job: str, compared: str) -> bool:
    """Return whether a member may write a file: which stage or module it saves may change."""
    if compared.startswith(ARTIFACTS):
        return compared.startswith(f"{ARTIFACTS}{plain(member)}/")
    if not compared.startswith(_ROUNDS):
        return True
    pieces = [piece_file(n) for n in range(context.stores.jobs.get(job).spec.parts_saved)]
    return compared.rpartition("/")[2] in (pieces or [plain(member_part(member)), SHARED_PART])


def _left_by(node: str, context: Context, job: str, name: str) -> bool:
    """Return whether a file is an artifact of a process that ran on this node last."""
    member, _, inside = name.removeprefix(ARTIFACTS).partition("/")
    record = context.stores.jobs.get(job).process(member)
    ours = name.startswith(ARTIFACTS) and inside != ""
    return ours and record is not None and record.node == node


async def get_file(request: Request, context: Context) -> Response:
    """GET or HEAD /api/jobs/J/files/PATH: stream a file; supports ranges."""
    job, name = job_of(request, context), str(request.path_params["path"])
    role = identity_of(request).role
    compared = plain(name)
    if role == "job" and (compared in _UNREAD or compared.startswith(f"{STATES}/")):
        raise HttpRefused(403, AuthError("members do not read this file", given=name))
    info = await context.stores.files.stat(job, name)
    if info is None:
        raise HttpRefused(404, HubError("the job has no such file", given=f"{name!r} of {job}"))
    if compared == "job.toml" and role == "viewer":
        text = text_for_viewers(context.stores.jobs.get(job))
        return PlainTextResponse(text, headers={"x-content-type-options": "nosniff"})
    headers = {
        "last-modified": formatdate(info.modified, usegmt=True),
        "x-content-type-options": "nosniff",
        # HTML from a job must not act with the dashboard's login.
        "content-security-policy": "sandbox allow-scripts",
    }
    if info.sha256:
        headers["x-sha256"] = info.sha256
    return FileResponse(context.stores.files.path(job, name), headers=headers)


async def list_files(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/files: names, sizes and times."""
    return Json(await context.stores.files.list(job_of(request, context)))


async def send_bytes(request: Request, _context: Context) -> Response:
    """GET /api/speed?bytes=N: that many bytes, to measure the download speed."""
    wanted = int(number(request, "bytes", 1e6, high=MAX_SPEED_BYTES))

    async def blocks() -> AsyncIterator[bytes]:
        left = wanted
        while left > 0:
            yield _BLOCK[:left]
            left -= len(_BLOCK)

    return StreamingResponse(
        blocks(),
        media_type="application/octet-stream",
        headers={"content-length": str(wanted), "cache-control": "no-store"},
    )


async def take_bytes(request: Request, _context: Context) -> Response:
    """POST /api/speed: count the bytes of the body, to measure the upload speed."""
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
    return Json({"bytes": total})


async def put_blob(request: Request, context: Context) -> Response:
    """PUT /api/blobs/SHA256: store a blob; bytes with another hash are refused."""
    sha256 = str(request.path_params["sha256"])
    identity = identity_of(request)
    nbytes = await context.stores.blobs.put(
        sha256, request.stream(), max_bytes=MAX_BLOB_BYTES,
        holder=Holder(identity.role, identity.name), announced=announced_bytes(request),
    )  # fmt: skip
    return Json({"sha256": sha256, "nbytes": nbytes}, status_code=201)


def _runs_code(node: str, context: Context, sha256: str) -> bool:
    """Return whether a pack is the code of a job with a process on this node."""
    return any(
        code_of(job.spec) == sha256 and any(process.node == node for process in job.processes)
        for job in context.stores.jobs.list()
        if not job.over
    )


async def get_blob(request: Request, context: Context) -> Response:
    """GET or HEAD /api/blobs/SHA256: stream a blob; supports ranges.

    A node gets the code of jobs that run on it. A job gets any blob by its hash: it receives the
    hashes of large queue items with the items.
    """
    sha256, blobs = str(request.path_params["sha256"]), context.stores.blobs
    identity = identity_of(request)
    if identity.role == "node" and not _runs_code(identity.name, context, sha256):
        raise HttpRefused(
            403,
            AuthError(
                "a node gets the code of its own jobs only", given=f"{sha256} for {identity.name}"
            ),
        )
    if not await asyncio.to_thread(blobs.has, sha256):
        raise HttpRefused(404, HubError("the hub does not have this blob", given=sha256))
    headers = {"x-sha256": sha256, "x-content-type-options": "nosniff"}
    path = blobs.path(sha256)
    return FileResponse(path, headers=headers, media_type="application/octet-stream")
