"""What a member holds of microbatches, and its sums of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.devices.choose import CPU
from atoll.errors import PeerRefused
from atoll.strategies.inner.swarm.stage import ModelStage
from atoll.strategies.vectors.flat import real_view


@dataclass(slots=True)
class Held:
    """A microbatch between its passes, and until it is counted."""

    inputs: tuple[Tensor, ...]
    pending: Pending | None = None


@dataclass(slots=True)
class Pending:
    """Gradients that count once the ledger says so."""

    gradients: list[Tensor | None]
    changes: list[Tensor]
    """Of the inexact buffers; complex values are pairs of real ones."""
    counts: list[Tensor]
    """New values of the other buffers."""
    rows: int
    loss: float


@dataclass(slots=True)
class Sums:
    """Everything that was folded in a step."""

    gradients: list[Tensor]
    changes: list[Tensor]
    counts: list[Tensor] = field(default_factory=list)
    rows: int = 0
    loss: float = 0.0

    @classmethod
    def over(
        cls, parameters: Sequence[Tensor], buffers: Sequence[Tensor], kind: torch.dtype
    ) -> Sums:
        """Return sums without a row."""
        return cls(
            [torch.zeros_like(p, dtype=kind) for p in parameters],
            [torch.zeros_like(real_view(b), dtype=kind) for b in buffers],
        )

    def fold(self, pending: Pending, *, early: bool) -> None:
        """Add a microbatch, times its rows; an `early` one counted on older buffers."""
        for total, gradient in zip(self.gradients, pending.gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=pending.rows)
        for total, change in zip(self.changes, pending.changes, strict=True):
            total.add_(change, alpha=pending.rows)
        if not (early and self.counts):
            self.counts = pending.counts
        self.rows += pending.rows
        self.loss += pending.loss * pending.rows

    def add(self, mean: Tensor, *, rows: int, loss: float) -> None:
        """Add what another member has folded: a mean of its sums over so many rows."""
        mine = (*self.gradients, *self.changes)
        parts = torch.split(mean, [tensor.numel() for tensor in mine])
        for tensor, part in zip(mine, parts, strict=True):
            tensor.add_(part.view(tensor.shape).to(tensor), alpha=rows)
        self.rows += rows
        self.loss += loss * rows

    def mean(self) -> Tensor:
        """Return the mean as a float32 vector in main memory; without a row it is zero."""
        rows, totals = max(1, self.rows), (*self.gradients, *self.changes)
        sizes = [total.numel() for total in totals]
        vector = torch.empty(sum(sizes), dtype=torch.float32, device=CPU)
        for total, part in zip(totals, torch.split(vector, sizes), strict=False):
            part.copy_((total / rows).flatten())
        return vector


class OlderWeights:
    """A stage's parameters and buffers as they were one step ago: one more copy in memory."""

    def __init__(
        self, stage: ModelStage, parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]
    ) -> None:
        """Allocate copies of these tensors, each of which has a name in the whole model."""
        inside = {id(parameter): name for name, parameter in stage.module.named_parameters()}
        named = {**stage.parameters(), **stage.buffers(), **stage.untrained()}
        names = {id(tensor): name for name, tensor in named.items()}
        self._inside = [inside[id(parameter)] for parameter in parameters]
        self._names = [names[id(tensor)] for tensor in (*parameters, *buffers)]
        self.parameters = [torch.empty_like(p).requires_grad_() for p in parameters]
        self.buffers = [torch.empty_like(buffer) for buffer in buffers]

    def tensors(self) -> dict[str, Tensor]:
        """Return them by their names in the whole model; nothing is copied."""
        values = [*(p.detach() for p in self.parameters), *self.buffers]
        return dict(zip(self._names, values, strict=True))

    @torch.no_grad()
    def renew(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy the current values."""
        for old, new in zip(
            (*self.parameters, *self.buffers), (*parameters, *buffers), strict=True
        ):
            old.copy_(new)

    def outputs(self, module: nn.Module, values: Sequence[Tensor]) -> object:
        """Compute the stage with these parameters; its own stay, because others may read them."""
        return functional_call(
            module, dict(zip(self._inside, self.parameters, strict=True)), tuple(values)
        )


def check_gradients(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Raise PeerRefused unless gradients have the shapes of a stage's outputs."""
    given = [None if g is None else tuple(g.shape) for g in gradients]
    expected = [tuple(output.shape) for output in outputs]
    fits = len(given) == len(expected) and all(
        shape is None or shape == wanted for shape, wanted in zip(given, expected, strict=True)
    )
    if not fits:
        raise PeerRefused(
            "the gradients of a microbatch do not fit what the stage puts out",
            given=given, expected=str(expected),
        )  # fmt: skip
