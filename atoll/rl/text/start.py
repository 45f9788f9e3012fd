"""The model that policies, their reference and the value model start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from atoll.config import JobSpec
from atoll.data import make_tokenizer
from atoll.errors import ConfigError
from atoll.models import GPT, build_model
from atoll.rl.seeds import seed_for
from atoll.rl.text.pretrain import pretrain
from atoll.rl.text.prompts import Wording
from atoll.rl.text.tasks import TextTask, make_task
from atoll.train.sample import load_model


@dataclass(frozen=True, slots=True)
class Beginning:
    """What every member of a job for language models builds the same."""

    tasks: dict[str, TextTask]
    """By policy."""
    wording: Wording
    model: GPT
    trained: bool
    """Whether the model has learned something yet, elsewhere."""


def begin(spec: JobSpec) -> Beginning:
    """Return tasks, tokens and the model of a job; without `start` the model is fresh.

    Raises:
        ConfigError: a task, or the model, cannot be made.
        CheckpointMissing: there are no weights where `start` says.
        CheckpointCorrupt: they are damaged.
    """
    rl = spec.rl
    tasks = {policy.name: make_task(policy.env, policy.options) for policy in rl.policies}
    if rl.start:
        model, tokenizer = load_model(Path(rl.start).expanduser())
        if not isinstance(model, GPT):
            raise ConfigError(
                "only the built-in GPT can learn by rewards",
                given=f"start = {rl.start!r}, a {type(model).__name__}",
                expected="weights of the model gpt",
            )
        return Beginning(tasks, Wording(tokenizer), model, trained=True)
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):  # the layers draw from torch's own state
        torch.manual_seed(seed_for(spec.job.seed, "weights"))
        model = cast(
            GPT,
            build_model(spec.model.name, vocab_size=tokenizer.vocab_size, **spec.model.options),
        )
    return Beginning(tasks, Wording(tokenizer), model.eval(), trained=False)


def train_beginning(
    beginning: Beginning, spec: JobSpec, *, stopping: Callable[[], bool] = lambda: False
) -> float:
    """Teach a fresh model the examples of all tasks, in place; return its last loss.

    `[train]` says how: `steps`, `batch` (examples), `lr`. The seed decides all of it, so any member
    gets the same model.
    """
    return pretrain(
        beginning.model, list(beginning.tasks.values()), beginning.wording, table=spec.train,
        seed=spec.job.seed, stopping=stopping,
    )  # fmt: skip
