"""The memory of a SWARM's stages, predicted before a job is submitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.cli.jobs.jobfile import Submission
from atoll.cli.jobs.submit import place_of
from atoll.errors import ConfigError, DataError
from atoll.hub.scheduler.resources import mismatch, request_of
from atoll.node.machine.probe import torch_version

if TYPE_CHECKING:
    from atoll.config import JobSpec


def with_stage_needs(submission: Submission) -> Submission:
    """Return a job with the cuts of its stages, and the memory that each needs, if it is a SWARM.

    Unchanged if it cannot be known here: without torch, with a model of the job's own code, which
    must not run before it is on a node, and where data or a pretrained model are on nodes only.

    Raises:
        ConfigError: the model cannot be cut into these stages; the nearest that can is named.
    """
    spec = submission.spec
    if not spec.swarm.stages or not torch_version():
        return submission
    from atoll.models import is_custom

    if is_custom(spec.model.name):
        return submission
    from atoll.plan.swarm import plan_swarm

    try:
        plan = plan_swarm(spec)
    except DataError:
        return submission
    needs = [round(plan.needs_bytes(stage) / 1e9, 6) for stage in plan.stages]
    swarm = dataclasses.replace(spec.swarm, needs_gb=needs, cuts=list(plan.cuts))
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, swarm=swarm))


def check_offered(spec: JobSpec, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a SWARM with a stage too large for every machine that is online and may run it.

    Without such a machine nothing is refused: the job waits.

    Raises:
        ConfigError: a stage is too large; names the number of stages that would fit.
    """
    needs, want = spec.swarm.needs_gb, request_of(spec)
    if not needs or len(needs) != spec.swarm.stages:
        return
    places = [place_of(dict(view)) for view in nodes]
    offered = {
        place.node: offered_bytes(spec, dict(view))
        for place, view in zip(places, nodes, strict=True)
        if not mismatch(want, place.emptied())
    }
    largest = max(offered, key=lambda node: offered[node], default="")
    if not largest or 1e9 * max(needs) <= offered[largest]:
        return
    from atoll.plan.swarm import fewest_stages

    too_large = [stage for stage, need in enumerate(needs) if 1e9 * need > offered[largest]]
    fitting = fewest_stages(spec, limit_bytes=offered[largest])
    remedy = "a machine with more memory, or fewer rows in a microbatch (microbatches in [swarm])"
    if fitting is not None:
        most = fitting.worst_bytes / 1e9
        remedy = f"stages = {len(fitting.stages)} in [swarm]: the largest needs {most:.1f} GB"
    raise ConfigError(
        "stages that fit no offered node",
        given=f"stage{'s' if len(too_large) > 1 else ''} {', '.join(map(str, too_large))} of "
        f"{spec.swarm.stages}, up to {max(needs):.1f} GB",
        expected=f"at most {offered[largest] / 1e9:.1f} GB, as {largest} offers", remedy=remedy,
    )  # fmt: skip


def offered_bytes(spec: JobSpec, view: Mapping[str, Any]) -> int:
    """Return the memory that a node offers for a stage: of its accelerator, if that computes."""
    info = view["info"]
    offer = info.get("offer") or {}
    kept = "cpu" in (spec.job.device, offer.get("device"))
    if info.get("gpu_memory_bytes") and not kept and not info.get("idle"):
        return int(info["gpu_memory_bytes"])
    limits = [info["memory_bytes"], offer.get("memory_bytes") or 0]
    return int(min(limit for limit in limits if limit)) if any(limits) else 0
