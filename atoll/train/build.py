"""From a job file to what is trained: data, model, optimizer, schedule and strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atoll.codec import make_codec
from atoll.codec.codec import Codec
from atoll.config import JobSpec
from atoll.data import Dataset, Shards, load_dataset
from atoll.group.policy import GroupPolicy
from atoll.models import GPT, build_model
from atoll.strategies.fitting import check
from atoll.strategies.strategy import Outer
from atoll.strategies.table import build_outer, resolve
from atoll.task import Task
from atoll.train.optimizers import StepSchedule, build_optimizer, learning_rate

EVALUATIONS = 10
CHECKPOINTS = 8
"""How many a run has about, when the job does not say."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """After which rounds something happens."""

    evaluate: int
    save: int

    @classmethod
    def of(cls, spec: JobSpec, rounds: int) -> Rhythm:
        """Return what the job says, or what divides a run of so many rounds well."""
        return cls(
            spec.train.eval_every or max(1, rounds // EVALUATIONS),
            spec.checkpoint.every or max(1, rounds // CHECKPOINTS),
        )


@dataclass(frozen=True, slots=True)
class Built:
    """One member's parts of a job; the strategy is not set up yet."""

    model: GPT
    dataset: Dataset
    shards: Shards
    task: Task
    schedule: StepSchedule
    outer: Outer
    codec: Codec
    strategy: str
    """Name of the outer strategy."""
    policy: GroupPolicy

    def rhythm(self, spec: JobSpec, *, peers: int) -> Rhythm:
        """Return after which rounds to evaluate and save."""
        elements = self.task.num_parameters + sum(b.numel() for b in self.task.buffers())
        plan = self.outer.traffic(elements, max(2, peers), steps=spec.train.steps)
        return Rhythm.of(spec, plan.rounds)


def build(spec: JobSpec, *, member: str, slot: int, num_slots: int) -> Built:
    """Build everything from seeds: the same weights on every member.

    Raises:
        ConfigError: the job names something that does not exist.
        DataError: the text is missing or too small.
    """
    resolved, job = resolve(spec.strategy, steps=spec.train.steps), spec.job
    check(
        resolved, nodes=job.nodes, min_nodes=job.min_nodes, route=job.route,
        optimizer=spec.train.optimizer,
    )  # fmt: skip
    if spec.job.threads:
        torch.set_num_threads(spec.job.threads)
    data, seed = spec.data, spec.job.seed
    outer, codec = build_outer(resolved), make_codec(resolved.codec)
    dataset = load_dataset(data.corpus, tokenizer=data.tokenizer, held_out=data.held_out, seed=seed)
    torch.manual_seed(seed)
    options = {"vocab_size": dataset.tokenizer.vocab_size, **spec.model.options}
    model = build_model(spec.model.name, **options)
    if not isinstance(model, GPT):
        raise TypeError(f"model {spec.model.name!r} cannot be trained by the built-in trainer")
    optimizer = build_optimizer(model, spec.train)
    schedule = StepSchedule(optimizer, learning_rate(spec.train))
    task = Task(
        model, optimizer, schedule, member=member, last=spec.train.steps,
        paced=spec.train.pace == "measured",
    )  # fmt: skip
    shards = Shards(
        dataset.train, slots=num_slots, context=model.config.context, seed=seed, order=data.order
    )
    # What only dropout uses differs from member to member; the weights above do not.
    torch.manual_seed(seed * 1_000 + slot + 1)
    name, policy = resolved.outer, resolved.policy
    return Built(model, dataset, shards, task, schedule, outer, codec, name, policy)
