"""Stages of small models in one process, and the same computation by the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.models import build_model
from atoll.strategies.inner.pipeline.subspace import (
    SEED,
    Constraint,
    Subspace,
    residual_stream,
)
from atoll.strategies.inner.swarm.activations import ActivationCodec
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut, cuts_of

VOCAB, LENGTH = 18, 8
Batch = tuple[Tensor, Tensor]


class Layers(nn.Sequential):
    """A sequence of layers as somebody may bring it; one of them overwrites its inputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3),
        )  # fmt: skip

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self(inputs), targets)


def _text(name: str, **more: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "width": 16, "heads": 2, "layers": 4, "context": LENGTH}
    model: Any = build_model(name, **(sizes | {"tie": False} | more))
    with torch.no_grad():  # residual outputs start at zero: let every parameter have a gradient
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


MODELS: Mapping[str, Callable[[], Any]] = {
    "gpt": lambda: _text("gpt"),
    "llama": lambda: _text("llama"),
    "resnet": lambda: build_model("resnet", width=8, blocks=1, channels=3),
    "layers": Layers,
}


def _initial() -> Mapping[str, Any]:
    with torch.random.fork_rng(devices=[]):
        models = {}
        for name, build in MODELS.items():
            torch.manual_seed(3)
            models[name] = build()
        return models


# Built before any member starts: threads share the random state, and every microbatch seeds it.
INITIAL = _initial()


def built(name: str) -> Any:
    """Return a copy of the initial model of this name."""
    return copy.deepcopy(INITIAL[name])


def fresh(name: str, *, seed: int) -> Any:
    """Return a new model with weights of this seed; not for members that are threads."""
    torch.manual_seed(seed)
    return MODELS[name]()


def batch_of(name: str, step: int, index: int, *, rows: int = 4) -> Batch:
    """Return the rows of a microbatch, a pure function of its numbers."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    if name in ("gpt", "llama"):
        ids = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    if name == "resnet":
        images = torch.randn(rows, 3, 8, 8, generator=generator)
        return images, torch.randint(10, (rows,), generator=generator)
    inputs = torch.randn(rows, 6, generator=generator)
    return inputs, torch.randn(rows, 3, generator=generator)


def runners(
    name: str, *, cut: StageCut, model: Callable[[str], Any] = built, most: int = 64
) -> list[StageRunner]:
    """Return one runner per stage; each cuts a model of its own, as processes do."""
    return [
        StageRunner(ModelStage(model(name), stage, cut), seed=7, most=most)
        for stage in range(cut.stages)
    ]


def through(
    path: Sequence[StageRunner],
    key: MicrobatchKey,
    batch: Batch,
    *,
    codec: str = "fp32",
    back: Sequence[StageRunner] = (),
) -> float:
    """Take a microbatch through all stages, and back over others if `back` names them."""
    code = ActivationCodec(codec)

    def sent(tensors: Sequence[Tensor | None]) -> Any:
        heads, data = code.encode(tensors)
        return code.decode(heads, b"".join(bytes(part) for part in data))

    for runner in {*path, *back}:
        runner.stage.enter(batch[0])
    values: tuple[Tensor, ...] = (batch[0],)
    kept = []
    for runner in path[:-1]:
        kept.append(values)
        values = sent(runner.forward(key, values))
    loss, gradients = path[-1].loss(key, values, batch[1])
    for number in reversed(range(len(path) - 1)):
        runner = back[number] if back else path[number]
        inputs = kept[number] if back else None
        gradients = runner.backward(key, sent(gradients), inputs=inputs)
    return loss


def confined(model: Any, cut: StageCut) -> Constraint:
    """Confine an undivided model as the stages of a cut are."""
    subspace = Subspace.drawn(16, cut.size, seed=SEED)
    last = {id(p) for u in model.units()[cuts_of(model, cut)[-1] :] for p in u.parameters()}
    sending = {n: p for n, p in model.named_parameters() if id(p) not in last}
    table = subspace.outside(model.embedding.weight.detach())
    constraint = Constraint.of(sending, residual_stream(model), subspace, table)
    constraint.project()
    return constraint


def means(path: Sequence[StageRunner]) -> dict[str, Tensor]:
    """Finish a step everywhere; return all gradients by name."""
    for runner in path:
        runner.apply(runner.gradient()[0])
    found = {n: p.grad for runner in path for n, p in runner.stage.parameters().items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def plainly(
    model: Any, batches: Sequence[Batch], *, rows: int
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, mean gradients and buffers of microbatches in the whole model, in a loop."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
    changes = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in before.items()}
    total = 0.0
    for inputs, targets in batches:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        model.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        for name, parameter in model.named_parameters():
            sums[name] += rows * parameter.grad.double()
        for name, buffer in model.named_buffers():
            changes[name] += rows * (buffer - before[name]).double()
        total += loss.item() / len(batches)
    count = rows * len(batches)
    gradients = {name: (value / count).float() for name, value in sums.items()}
    buffers = {n: before[n] + (c / count).to(before[n].dtype) for n, c in changes.items()}
    return total, gradients, buffers
