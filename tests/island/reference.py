"""Small models, and what a step on one device makes of them: what every mesh has to equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from atoll.config import MeshShape
from atoll.island.world import build_mesh
from atoll.models.gpt import GPT, GPTConfig
from atoll.strategies.inner.base import Parts
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.options import InnerOptions

CPU = torch.device("cpu")
VOCAB, LENGTH, FEATURES = 18, 6, 5


class Perceptron(nn.Sequential):
    """Layers one after the other, as somebody may bring them: no `units`, no plan."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self(inputs), targets)


class Odd(Perceptron):
    """A frozen parameter, one that the forward pass leaves out, and a buffer that is kept."""

    scales: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scales", torch.full((2,), 0.3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self[2](self[1](self[0](inputs)))
        return hidden * self.frozen * self.scales


def gpt(**changes: Any) -> GPT:
    sizes = {"vocab_size": VOCAB, "width": 16, "heads": 2, "layers": 3, "context": LENGTH}
    torch.manual_seed(5)
    model = GPT(GPTConfig(**(sizes | changes))).double()
    with torch.no_grad():  # residual outputs start at zero: let every parameter have a gradient
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def perceptron(*extra: nn.Module) -> Perceptron:
    torch.manual_seed(6)
    layers = [nn.Linear(FEATURES, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 8), nn.Tanh()]
    return Perceptron(*layers, *extra, nn.Linear(8, 2)).double()


def odd() -> Odd:
    torch.manual_seed(7)
    return Odd().double()


MODELS: Mapping[str, Any] = {
    "gpt": gpt,
    "untied": lambda: gpt(tie=False),
    "dropout": lambda: gpt(dropout=0.3),
    "perceptron": perceptron,
    "odd": odd,
}


def batch_for(model: nn.Module, *, rows: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT):
        ids = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def plain(name: str, *, rows: int = 8, clip: float = 0.0) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a whole batch, on one device, the usual way."""
    model = MODELS[name]()
    loss = model.loss(*batch_for(model, rows=rows))
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    named = model.named_parameters()
    return loss.item(), {n: p.grad for n, p in named if p.grad is not None}


def divided(model: nn.Module, axes: Mapping[str, int], **words: Any) -> Parts:
    """Divide a model over all ranks of the default group."""
    options = InnerOptions(shape=MeshShape(**axes), **words)
    return split_model(model, options, mesh=build_mesh(options.shape, device=CPU), device=CPU)


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return a gradient as a plain tensor on every rank; collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return None if tensor is None else tensor.clone()


def gradients(parts: Parts) -> dict[str, Tensor]:
    found = {name: whole(p.grad) for name, p in parts.parameters().items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def spread(
    name: str, axes: dict[str, int], words: dict[str, Any], single: bool = False
) -> tuple[float, dict[str, Tensor], list[str]]:
    """Return loss and gradients of a second step under a mesh, and the names of parameters."""
    model: nn.Module = MODELS[name]()
    if single:
        model = model.float()
    batch = batch_for(model)
    parts = divided(model, axes, **words)
    parts.train(True)
    parts.backward(*batch)
    loss = parts.backward(*batch)
    return loss.item(), gradients(parts), list(parts.parameters())


def assert_same(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, within: float = 1e-10
) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        worst = (found[name] - tensor).abs().max().item()
        assert worst <= within * max(1.0, tensor.abs().max().item()), f"{name}: {worst}"
