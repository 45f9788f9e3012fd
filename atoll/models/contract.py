"""The interface that lets every inner strategy train a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The modules that write a model's residual stream, for activations in a subspace.

    Between any two units after the embedding the activations MUST be the sum of their outputs.
    """

    embedding: str
    """Name of the token embedding."""
    writers: tuple[str, ...]
    """Patterns of names of linear layers whose outputs are added."""


class Trainable(Protocol):
    """A model of the registry; a user's own model may lack `units` and `tensor_plan`.

    `loss(inputs, targets)` MUST be `criterion(model(inputs), targets)`.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return outputs for a batch of inputs, (rows, ...)."""
        ...

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, in nats per token or sample; MUST NOT use parameters."""
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        ...

    def units(self) -> Sequence[nn.Module]:
        """Return modules of this model; their composition MUST be its forward pass.

        Every parameter is in a unit; a tied one in all units that use it. Pipelines split between
        units; recomputation and sharding work per unit.
        """
        ...

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan: pattern of module names -> `column`, `row`, ...

        The words are in `atoll.strategies.inner.tensor.plans.WORDS`.
        """
        ...
