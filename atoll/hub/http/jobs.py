"""REST handlers of jobs: submit, inspect, stop, resume, delete; metrics, events, output."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.config import JobSpec
from atoll.config.writing import without_secrets
from atoll.errors import HubError
from atoll.hub.http.context import Context, JobDeleter
from atoll.hub.http.endpoint import HttpRefused, Json, audit_more, body_as, identity_of, number
from atoll.hub.http.views import job_row, job_view
from atoll.hub.jobs.record import Job, job_facts

NOT_READ = JobSpec()
"""The spec of records with a job file that this version cannot read."""


class Submission(msgspec.Struct, frozen=True):
    """Body of POST /api/jobs."""

    spec: str
    files: dict[str, str] = {}
    """Text files of the job, by name."""
    batch: str = ""
    key: str = ""
    """Idempotency key: repeating a submission with it creates no second job."""


class StopRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/jobs/J/stop."""

    grace_s: float = 10.0


class ResumeRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/jobs/J/resume."""

    spec: str = ""
    """New job file; empty: unchanged."""
    checkpoint: int | None = None
    """Round of the checkpoint; -1: none; null: the newest undamaged one."""


class BoundsRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/jobs/J/nodes."""

    max: int
    min: int = 0
    """0: all are needed to start, one to continue."""


def view_of(context: Context, job: str) -> dict[str, Any]:
    """Return the full view of a job."""
    record = context.stores.jobs.get(job)
    metrics, swarm = context.stores.metrics, context.live.swarm(job)
    view = job_view(
        record,
        latest=metrics.latest(job),
        live=context.live.members(job),
        traffic=metrics.traffic.of_job(job),
        swarm=swarm,
        now=context.clock.wall(),
    )
    if swarm is not None and swarm["paused"] and not view["paused"]:
        view |= {"paused": True, "paused_reason": swarm["paused"]}
    return view | job_facts(record) | {"swarm": swarm, "paths": context.live.paths(job)}


def job_of(request: Request, context: Context) -> str:
    """Return the job id in the path; HttpRefused with 404 if it does not exist."""
    job: str = request.path_params["job"]
    if not context.stores.jobs.knows(job):
        raise HttpRefused(
            404,
            HubError(
                "there is no such job", given=repr(job), remedy="`atoll status` lists all jobs"
            ),
        )
    return job


async def submit(request: Request, context: Context) -> Response:
    """POST /api/jobs: store and schedule a job."""
    body = await body_as(request, Submission)
    job = await context.stores.jobs.create(
        body.spec, files=body.files, batch=body.batch, key=body.key, by=identity_of(request).name
    )
    audit_more(request, made=job.job)
    await context.live.submit(job.job)
    return Json({"job": job.job}, status_code=201)


def text_for_viewers(job: Job) -> str:
    """Return a job's file without its secrets, from the spec that was parsed when it was stored."""
    return without_secrets(job.text, job.spec if job.spec != NOT_READ else None)


def view_for(request: Request, context: Context, job: str) -> dict[str, Any]:
    """Return the view of a job without what the sender of a request may not see."""
    view = view_of(context, job)
    if identity_of(request).role == "viewer":
        view |= {"spec": text_for_viewers(context.stores.jobs.get(job))}
    return view


async def list_jobs(request: Request, context: Context) -> Response:
    """GET /api/jobs: every job, newest first; `?brief=1` omits specs and members."""
    jobs = [job.job for job in context.stores.jobs.list()]
    if request.query_params.get("brief") == "1":
        return Json([job_row(view_of(context, job)) for job in jobs])
    return Json([view_for(request, context, job) for job in jobs])


async def show_job(request: Request, context: Context) -> Response:
    """GET /api/jobs/J: one job."""
    return Json(view_for(request, context, job_of(request, context)))


async def stop(request: Request, context: Context) -> Response:
    """POST /api/jobs/J/stop: stop it after its round."""
    job = job_of(request, context)
    body = await body_as(request, StopRequest)
    await context.live.stop(job, grace_s=min(max(body.grace_s, 0.0), 86_400.0))
    return Json({"job": job})


async def scale(request: Request, context: Context) -> Response:
    """POST /api/jobs/J/nodes: change the bounds on its members."""
    job = job_of(request, context)
    body = await body_as(request, BoundsRequest)
    await context.live.scale(job, least=body.min, most=body.max)
    return Json({"job": job, "min": body.min, "max": body.max})


async def resume(request: Request, context: Context) -> Response:
    """POST /api/jobs/J/resume: resume it from a checkpoint."""
    job = job_of(request, context)
    body = await body_as(request, ResumeRequest)
    resumed = await context.live.resume(job, spec=body.spec, checkpoint=body.checkpoint)
    return Json({"job": resumed})


async def read_metrics(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/metrics?after=ID&limit=N: points, oldest first."""
    job, after = job_of(request, context), int(number(request, "after", 0))
    limit = int(number(request, "limit", 2000, low=1, high=10_000))
    points = await context.stores.metrics.read(job, after=after, limit=limit)
    return Json({"last": _last(points, after), "points": points})


async def read_events(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/events?after=ID&wait_s=S: events, oldest first."""
    job, after = job_of(request, context), int(number(request, "after", 0))
    limit = int(number(request, "limit", 1000, low=1, high=10_000))
    wait_s = number(request, "wait_s", 0.0, high=60.0)
    events = await context.stores.events.read(job, after=after, limit=limit, wait_s=wait_s)
    return Json({"last": _last(events, after), "events": events})


async def read_rounds(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/rounds?after=ID: decided attempts of rounds, oldest first."""
    job, after = job_of(request, context), int(number(request, "after", 0))
    limit = int(number(request, "limit", 1000, low=1, high=10_000))
    rounds = await context.live.rounds(job, after=after, limit=limit)
    return Json({"last": _last(rounds, after), "rounds": rounds})


async def read_logs(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/logs?after=ID&member=M&q=TEXT&wait_s=S&tail=N: output of its processes."""
    job, after = job_of(request, context), int(number(request, "after", 0))
    member = request.query_params.get("member", "")
    tail = int(number(request, "tail", 0, high=10_000))
    search = request.query_params.get("q", "")[:200]
    if tail:
        lines = await context.stores.logs.tail(job, member=member, search=search, limit=tail)
    else:
        lines = await context.stores.logs.read(
            job,
            after=after,
            member=member,
            search=search,
            limit=int(number(request, "limit", 1000, low=1, high=10_000)),
            wait_s=number(request, "wait_s", 0.0, high=60.0),
        )
    return Json({"last": _last(lines, after), "lines": lines})


def _last(items: list[dict[str, Any]], after: int) -> int:
    return int(items[-1]["id"]) if items else after


async def delete_job(request: Request, context: Context) -> Response:
    """DELETE /api/jobs/J?keep_files=1: delete an ended job."""
    job = job_of(request, context)
    keep = request.query_params.get("keep_files") == "1"
    identity = identity_of(request)
    by = f"{identity.role} {identity.name}" if identity.name != identity.role else identity.role
    return Json(await _deletions(context).delete(job, keep_files=keep, by=by))


async def show_size(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/size: files, items and bytes that deleting a job would remove."""
    return Json(await _deletions(context).size(job_of(request, context)))


def _deletions(context: Context) -> JobDeleter:
    if context.deletions is None:
        raise HttpRefused(503, HubError("this hub has not started yet"))
    return context.deletions
