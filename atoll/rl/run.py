"""Run a member's role in a reinforcement-learning job, by its slot."""

from __future__ import annotations

import logging
from typing import Any

import torch

from atoll.config import JobSpec
from atoll.config.rl_roles import ACTOR, LEARNER, member_roles
from atoll.devices.facts import has_float64
from atoll.rl.actor.actor import Actor
from atoll.rl.compatibility import check, is_text
from atoll.rl.critic.learner import CriticLearner, PoliciesLearner
from atoll.rl.critic.role import CriticRole
from atoll.rl.critic.service import ValueService
from atoll.rl.seeds import seed_for
from atoll.run import Run

log = logging.getLogger(__name__)


def run_job(spec: JobSpec, run: Run) -> None:
    """Run this member's role, and put its figures into `run.results`.

    Raises:
        AtollError: the role failed.
    """
    check(spec)
    run.results["rl"] = _part(spec, run)


def device_of_networks(device: torch.device) -> torch.device:
    """Return the device of policies and critics: the run's, or the processor.

    Running statistics of observations and targets are float64, which MPS does not support.
    """
    if has_float64(device):
        return device
    log.warning(
        "computes on the processor: running statistics need float64, which %s does not support; "
        'set device = "cpu" in [job] to avoid this warning', device.type,
    )  # fmt: skip
    return torch.device("cpu")


def _part(spec: JobSpec, run: Run) -> dict[str, Any]:
    if is_text(spec.rl):
        from atoll.rl.text.run import run_text_job

        summary: dict[str, Any] = run_text_job(spec, run, device_of_networks(run.device))
        return summary
    role = member_roles(spec.rl)[run.slot]
    device = device_of_networks(run.device)
    log.info("computes on %s", device)
    if role.role == ACTOR:
        return Actor(spec, run, role, device).run()
    seed = seed_for(run.seed, "critic")
    if role.role == LEARNER:
        return CriticRole(spec, run, PoliciesLearner(spec.rl, seed=seed, device=device)).run()
    learner = CriticLearner(spec.rl, seed=seed, device=device)
    if spec.rl.values != "service":
        return CriticRole(spec, run, learner).run()
    service = ValueService(run, rl=spec.rl, of=learner.answer, job=run.job)
    try:
        return CriticRole(spec, run, learner).run()
    finally:
        service.close()
