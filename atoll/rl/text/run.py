"""Run a member's role in a job for language models, by its slot."""

from __future__ import annotations

from typing import Any

import torch

from atoll.config import JobSpec
from atoll.config.rl_roles import ACTOR, SAMPLER, MemberRole, member_roles
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.critic.role import CriticRole
from atoll.rl.text.actor import TextActor
from atoll.rl.text.compatibility import check_text
from atoll.rl.text.critic import TextCritic, TextCriticLearner
from atoll.rl.text.episodes import decode_episodes
from atoll.rl.text.rollouts import RolloutWorker
from atoll.rl.text.start import shared_start_model
from atoll.run import Run


def run_text_job(spec: JobSpec, run: Run, device: torch.device = IN_MAIN_MEMORY) -> dict[str, Any]:
    """Run this member's role on a device; return its part of the summary.

    Raises:
        AtollError: the role failed.
    """
    check_text(spec)
    role = member_roles(spec.rl)[run.slot]
    beginning = shared_start_model(spec, run, device=device)
    if beginning is None:
        return _nothing(role)
    if role.role == ACTOR:
        return TextActor(spec, run, role, beginning).run()
    if role.role == SAMPLER:
        return RolloutWorker(spec, run, role, beginning).run()
    names = [policy.name for policy in spec.rl.policies]
    critic = TextCritic(names, beginning.model, spec.rl, seed=run.seed)
    return CriticRole(spec, run, TextCriticLearner(critic), decode=decode_episodes).run()


def _nothing(role: MemberRole) -> dict[str, Any]:
    """Return the figures of a member that was stopped before it could begin."""
    return {
        "role": role.role, "policy": role.policy, "env": role.env, "env_steps": 0, "episodes": 0,
        "return_first": None, "return_last": None, "return_best": None, "updates": 0,
        "dropped": {}, "staleness": {}, "queue_wait_s": 0.0, "sent_bytes": 0, "gif": "",
    }  # fmt: skip
