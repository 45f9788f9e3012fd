"""The interface that lets every inner strategy train a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn


class Trainable(Protocol):
    """A model of the registry; a user's own model may lack the last two methods.

    `loss(inputs, targets)` MUST be `criterion(model(inputs), targets)`.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return outputs for a batch of inputs, (rows, ...)."""
        ...

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar; nats per token or per sample. Uses no parameters."""
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        ...

    def units(self) -> Sequence[nn.Module]:
        """Return modules of this model whose composition is its forward pass.

        Every parameter is in a unit; one that two units share is in both. Pipelines split between
        units; recomputation and sharding work per unit.
        """
        ...

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan: pattern of module names -> `column`, `row`, ...

        See `atoll.strategies.inner.tensor.plans.WORDS` for the words.
        """
        ...
