"""Run a member's role in a reinforcement-learning job, by its slot."""

from __future__ import annotations

from typing import Any

from atoll.config import JobSpec
from atoll.config.rl_roles import ACTOR, LEARNER, member_roles
from atoll.rl.actor.actor import Actor
from atoll.rl.compatibility import check, is_text
from atoll.rl.critic.learner import CriticLearner, PoliciesLearner
from atoll.rl.critic.role import CriticRole
from atoll.rl.critic.service import ValueService
from atoll.rl.seeds import seed_for
from atoll.run import Run


def run_job(spec: JobSpec, run: Run) -> None:
    """Run this member's role, and put its figures into `run.results`.

    Raises:
        AtollError: the role failed.
    """
    check(spec)
    run.results["rl"] = _part(spec, run)


def _part(spec: JobSpec, run: Run) -> dict[str, Any]:
    if is_text(spec.rl):
        from atoll.rl.text.run import run_text_job

        told: dict[str, Any] = run_text_job(spec, run)
        return told
    role = member_roles(spec.rl)[run.slot]
    if role.role == ACTOR:
        return Actor(spec, run, role).run()
    seed = seed_for(run.seed, "critic")
    if role.role == LEARNER:
        return CriticRole(spec, run, PoliciesLearner(spec.rl, seed=seed)).run()
    learner = CriticLearner(spec.rl, seed=seed)
    if spec.rl.values != "service":
        return CriticRole(spec, run, learner).run()
    desk = ValueService(run, rl=spec.rl, of=learner.answer, job=run.job)
    try:
        return CriticRole(spec, run, learner).run()
    finally:
        desk.close()
