"""What the tests of language models share: a tiny model, a job, and completions of both."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from atoll.config import JobSpec, TrainTable
from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.config.tables import JobTable, ModelTable, StrategyTable
from atoll.data import make_tokenizer
from atoll.models import GPT, GPTConfig
from atoll.rl.text.episodes import Episodes
from atoll.rl.text.prompts import Wording
from atoll.rl.text.rewards import rewards_per_step, scores
from atoll.rl.text.sampler import log_probabilities, write
from atoll.rl.text.tasks import Brackets, TextTask

WORDING = Wording(make_tokenizer("bytes"))


def gpt(seed: int = 0, *, width: int = 16, context: int = 32, spread: float = 0.3) -> GPT:
    """Return a tiny model whose blocks do something from the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(layers=2, width=width, heads=2, context=context)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model


def rl_table(**changes: Any) -> RlTable:
    """Return a small `[rl]`."""
    policies = [PolicyTable(name="one", env="text:brackets", options={"kinds": "()", "most": 3})]
    table = RlTable(
        steps=64, environments=4, group=4, max_tokens=8, epochs=1, minibatches=1, critic_epochs=2,
        critic_minibatches=2, gamma=1.0, kl=0.05, policies=policies, save_every=2,
    )  # fmt: skip
    return dataclasses.replace(table, **changes)


def job(rl: RlTable, *, steps: int = 20, seed: int = 3) -> JobSpec:
    """Return a small job."""
    return JobSpec(
        job=JobTable(seed=seed, nodes=rl.members),
        model=ModelTable(options={"layers": 2, "width": 32, "heads": 2, "context": 24}),
        train=TrainTable(steps=steps, batch=32, lr=1e-2, warmup=5),
        strategy=StrategyTable(preset="alone"), rl=rl,
    )  # fmt: skip


def episodes(
    model: GPT, reference: GPT, *, task: TextTask | None = None, count: int = 6, seed: int = 1,
    policy: str = "one", temperature: float = 1.0, kl: float = 0.05, sequence: int = 1,
) -> Episodes:  # fmt: skip
    """Return completions that a model wrote."""
    task = task or Brackets(most=4)
    prompts = WORDING.draw(task, count, repeats=1, source=random.Random(seed), room=16)
    written = write(
        model, prompts, ends=WORDING.ends, max_tokens=8, temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    found = Episodes(
        policy=policy, tokens=written.tokens, prompts=prompts.lengths, lengths=written.lengths,
        log_probabilities=written.log_probabilities,
        rewards=torch.zeros_like(written.log_probabilities),
        scores=scores(task, prompts, written, WORDING), sequence=sequence, actor="w1",
    )  # fmt: skip
    with torch.no_grad():
        refer, _ = log_probabilities(
            reference, found.tokens, found.places, found.written, temperature=temperature
        )
    found.rewards = rewards_per_step(
        found.scores, found.lengths, found.log_probabilities, refer, kl=kl
    )
    return found.check()
