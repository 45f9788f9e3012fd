"""Refuse jobs for language models that cannot work, before they are scheduled. No torch."""

from __future__ import annotations

from collections import Counter

from atoll.config import JobSpec
from atoll.config.rl_tables import RlTable
from atoll.errors import ConfigError
from atoll.rl.text.tasks import PREFIX, make_task

CRITICS = ("pooled", "unconditioned", "own")
"""Critics for PPO with language models."""


def check_text(spec: JobSpec) -> None:
    """Refuse settings that language models do not support.

    Raises:
        ConfigError: with the nearest setting that works.
    """
    rl = spec.rl
    if rl.algorithm == "grpo":
        if rl.group < 2:
            raise ConfigError(
                "grpo compares completions of one prompt", given=f"group = {rl.group}",
                expected="2 or more",
            )  # fmt: skip
    elif rl.critic not in CRITICS:
        raise ConfigError(
            "language models have no such critic", given=f'critic = "{rl.critic}"',
            expected=" or ".join(f'"{name}"' for name in CRITICS), remedy='critic = "pooled"',
        )  # fmt: skip
    for name, given, works in (
        ("values", rl.values, "push"), ("pool", rl.pool, ""), ("recurrent", rl.recurrent, 0),
    ):  # fmt: skip
        if given != works:
            raise ConfigError(
                f"language models have no {name} but the default",
                given=f"{name} = {given!r}", expected=f"{name} = {works!r}",
            )  # fmt: skip
    library = spec.model.name == "transformers"
    if spec.model.name != "gpt" and not library:
        raise ConfigError(
            "this model cannot learn from rewards", given=f'name = "{spec.model.name}"',
            expected='name = "gpt" or "transformers" in [model]',
        )  # fmt: skip
    if library and rl.start:
        raise ConfigError(
            "models of transformers learn from rewards from their published weights",
            given=f"start = {rl.start!r}", expected="[rl] without start",
            remedy="export the model of another run (atoll export), and name that folder in source",
        )  # fmt: skip
    if rl.share:
        _check_share(rl)
    for policy in rl.policies:
        if ":" not in policy.env.removeprefix(PREFIX):  # a custom module exists on the nodes only
            make_task(policy.env, policy.options)


def _check_share(rl: RlTable) -> None:
    if rl.algorithm != "grpo" or any(policy.samplers for policy in rl.policies):
        raise ConfigError(
            "policies share completions that they write themselves, and compare in groups",
            given=f"share = {rl.share}, algorithm = {rl.algorithm!r}",
            expected='algorithm = "grpo", and no samplers; or share = 0',
        )
    if rl.share >= rl.environments:
        raise ConfigError(
            "a policy has to write a part of each batch itself",
            given=f"share = {rl.share}, environments = {rl.environments}",
            expected=f"share of 1 to {rl.environments - 1}",
        )
    alone = [task for task, n in Counter(one.task_word for one in rl.policies).items() if n == 1]
    if alone:
        raise ConfigError(
            "a policy has no other to share with", given=f"the only one with the task {alone[0]}",
            expected="two or more policies of each task, or share = 0",
        )  # fmt: skip
