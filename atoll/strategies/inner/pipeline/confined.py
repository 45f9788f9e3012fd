"""Keeps the stages of a row of ranks in one subspace, with the same table on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.strategies.inner.pipeline.subspace import (
    SEED,
    Constraint,
    Subspace,
    TokenBoundary,
    check_confined,
)

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class Confined:
    """The constraint on a rank's stages, and the boundary through which they exchange."""

    def __init__(self, model: nn.Module, size: int, *, group: Any, device: torch.device) -> None:
        """Confine a model's residual stream to `size` dimensions.

        Raises:
            ConfigError: the model cannot be confined, or not to so many.
        """
        self._stream = check_confined(model, size)
        embedding: Any = model.get_submodule(self._stream.embedding)
        tokens, width = embedding.weight.shape
        self._group = group
        self.embedding = f"{self._stream.embedding}.weight"
        """Name of the parameter from which the table follows."""
        drawn = Subspace.drawn(width, size, seed=SEED)
        self.subspace = Subspace(drawn.basis.to(device=device, dtype=embedding.weight.dtype))
        self._table = torch.zeros(tokens, width, dtype=embedding.weight.dtype, device=device)
        self.boundary = TokenBoundary(self.subspace, self._table)
        self._constraint = Constraint(self.subspace, [], None, self._table)

    def hold(self, sending: Mapping[str, nn.Parameter], *, ends: bool) -> None:
        """Constrain the parameters of this rank's stages that send, by their names.

        `ends`: this rank has the last stage, whose blocks may write anywhere.
        """
        self.boundary.measures = ends
        self._constraint = Constraint.of(sending, self._stream, self.subspace, self._table)

    @torch.no_grad()
    def load(self) -> None:
        """Adopt the parameters as they are now, and project them; collective over the row.

        What the embedding on the first rank has outside the subspace becomes the table.
        """
        if self.subspace.whole:
            return
        embedding: Tensor | None = self._constraint.embedding
        if embedding is not None:
            self._table.copy_(self.subspace.outside(embedding))
        dist.broadcast(self._table, group_src=0, group=self._group)
        self._constraint.project()

    def turn(self, basis: Tensor) -> None:
        """Go on with another basis, (d, K), the same on all ranks; collective over the row."""
        self.subspace.basis.copy_(basis)
        self.load()

    def in_coordinates(self) -> AbstractContextManager[None]:
        """Surround an optimizer's step; see :meth:`Constraint.in_coordinates`."""
        return self._constraint.in_coordinates()

    def project_gradients(self) -> None:
        """Project the gradients of the constrained parameters, before an optimizer's step."""
        self._constraint.project_gradients()
