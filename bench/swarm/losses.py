"""What int8 activations and early microbatches cost in loss: a SWARM's stages in one process.

The real stages, optimizer, data and codec; only the ledger and the network are missing, because
they do not change what is computed. So all is deterministic, and a busy machine changes nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.config import DataTable, JobSpec, JobTable, ModelTable, SwarmTable, TrainTable
from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.train.build import load_data
from atoll.train.swarm.build import JobStages, TrainedStage
from atoll.wire.swarm import SwarmPlace

STAGES, MICROBATCHES, BATCH, CONTEXT = 4, 4, 16, 64
HELD_OUT = 65_536
PLAIN = SwarmTable(stages=STAGES, microbatches=MICROBATCHES, codec="fp32")
ROWS = {
    "int8": dataclasses.replace(PLAIN, codec="int8"),
    "async": dataclasses.replace(PLAIN, schedule="async"),
    "async, half": dataclasses.replace(PLAIN, schedule="async", early=MICROBATCHES // 2),
}
"""By default a quarter of the microbatches is early."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows have in common."""

    model: str = "gpt"
    corpus: str = "stdlib"
    steps: int = 240
    width: int = 64
    train: TrainTable = dataclasses.field(
        default_factory=lambda: TrainTable(optimizer="muon", lr=0.02, options={"rest": "nadam"})
    )

    def job(self, swarm: SwarmTable, *, seed: int) -> JobSpec:
        """Return the job of a row."""
        sizes = {"layers": STAGES, "width": self.width, "heads": 4, "context": CONTEXT}
        return JobSpec(
            job=JobTable(name="losses", seed=seed), data=DataTable(corpus=self.corpus),
            model=ModelTable(name=self.model, options={"tie": False, **sizes}),
            train=dataclasses.replace(self.train, steps=self.steps, batch=BATCH, warmup=20),
            swarm=swarm,
        )  # fmt: skip


class Chain:
    """All stages of a job, and what passes between them."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec, self._codec = spec, ActivationCodec(spec.swarm.codec)
        stages = JobStages(spec, StageCut(stages=STAGES), member="w0")
        self._rows = stages.rows(MICROBATCHES)
        self.path: list[TrainedStage] = [
            stages.take(SwarmPlace(epoch=1, stage=number, step=0)) for number in range(STAGES)
        ]

    def step(self, number: int) -> None:
        """Do the step of this number."""
        for index in range(MICROBATCHES):
            key = MicrobatchKey(number, index)
            self._through(key, *self._rows(number, index))
            for stage in self.path:
                stage.runner.fold(key)
        for stage in self.path:
            mean, total = stage.runner.gradient()
            stage.update(mean, rows=total.rows)

    def _through(self, key: MicrobatchKey, inputs: Tensor, targets: Tensor) -> None:
        values: tuple[Tensor, ...] = (inputs,)
        for stage in self.path[:-1]:
            values = self._sent(stage.runner.forward(key, values))
        gradients: Any = self.path[-1].runner.loss(key, values, targets)[1]
        for stage in reversed(self.path[:-1]):
            gradients = stage.runner.backward(key, self._sent(gradients))

    def _sent(self, tensors: Sequence[Tensor | None]) -> Any:
        heads, data = self._codec.encode(tensors)
        return self._codec.decode(heads, b"".join(bytes(part) for part in data))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of held-out text, through exact activations."""
        losses = []
        held_out: Any = load_data(self._spec).held_out
        batches = held_out.batches(context=CONTEXT, batch=BATCH, limit_tokens=HELD_OUT)
        criterion: Any = self.path[-1].runner.stage.criterion
        for inputs, targets in batches:
            values = (inputs,)
            for stage in self.path:
                found = stage.runner.stage.module(*values)
                values = found if isinstance(found, tuple) else (found,)
            losses.append(criterion(values[0], targets).item())
        return statistics.fmean(losses)


def trained(setting: Setting, swarm: SwarmTable, *, seed: int) -> float:
    """Train with this table; return the held-out loss."""
    chain = Chain(setting.job(swarm, seed=seed))
    for number in range(setting.steps):
        chain.step(number)
    return chain.held_out_loss()


def gaps(setting: Setting, seeds: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the held-out loss of these rows beside that of `PLAIN`, by row and seed."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        plain = trained(setting, PLAIN, seed=seed)
        for name in names:
            loss = trained(setting, ROWS[name], seed=seed)
            about = {"row": name, "model": setting.model, "corpus": setting.corpus, "seed": seed}
            found.append({**about, "plain": plain, "loss": loss, "gap": loss / plain - 1.0})
    return found
