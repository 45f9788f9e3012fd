"""Turns the subspace of a pipeline's activations, every so many steps, on all ranks at once.

The gradient at the last boundary has a part outside the subspace, which is dropped. One step on the
Grassmannian turns the subspace towards it; weights and table are projected anew. The basis is kept
in the optimizer's state of the embedding: that state is one of coordinates, which mean nothing
without it. So checkpoints contain it, on any mesh.

Differs from the paper (https://arxiv.org/abs/2506.01260): moments keep their coordinates, so they
turn with the subspace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from atoll.strategies.inner.sharded_optimizer import LocalShard

if TYPE_CHECKING:
    from atoll.strategies.inner.pipeline.confined import Confined

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

RATE = 0.3
"""Length of a step on the Grassmannian, for a gradient of energy 1; see `Subspace.refreshed`."""

BASIS, UPDATES = "basis", "updates"
"""Keys in the optimizer's state of the embedding. Not every optimizer counts its own steps."""


class Turning:
    """One rank's part in turning a subspace; all methods but `begin` are collective over ranks."""

    def __init__(
        self, confined: Confined, own: LocalShard, *, every: int, rate: float = RATE
    ) -> None:
        """Turn after every so many updates of the optimizer."""
        self._confined, self._own, self._every, self._rate = confined, own, every, rate
        self._steps = 0

    @property
    def _due(self) -> bool:
        return (self._steps + 1) % self._every == 0 and not self._confined.subspace.whole

    def begin(self) -> None:
        """Measure gradients in the next backward pass if the subspace turns after it."""
        self._confined.boundary.measure(enabled=self._due)

    @torch.no_grad()
    def stepped(self) -> None:
        """Count an update; turn the subspace if it is time."""
        due, self._steps = self._due, self._steps + 1
        if (state := self._state()) is not None:
            state[UPDATES] = torch.tensor(float(self._steps))
        if not due:
            return
        subspace, boundary = self._confined.subspace, self._confined.boundary
        measured = boundary.measured()
        dist.all_reduce(measured)  # zero but on the last ranks of rows
        basis = subspace.refreshed(measured[:-1], total=measured[-1, 0], rate=self._rate).basis
        self._adopt(basis)
        if state is not None:
            state[BASIS] = subspace.basis.clone()

    @torch.no_grad()
    def restored(self) -> None:
        """Go on with the subspace, and the number of updates, of the state that was loaded."""
        state = self._state() or {}
        steps = max(float(state.get(key, 0)) for key in (UPDATES, "step"))
        known = torch.tensor([float(BASIS in state), steps])
        known = known.double().to(self._confined.subspace.basis.device)
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        self._steps = int(known[1])
        if not known[0]:
            return
        basis = torch.zeros_like(self._confined.subspace.basis)
        basis.copy_(state.get(BASIS, basis))
        self._adopt(basis)

    def _adopt(self, basis: Tensor) -> None:
        """Let all ranks have the first rank's basis; it has an embedding, too."""
        dist.broadcast(basis, src=0)
        self._confined.turn(basis)

    def _state(self) -> dict[str, Any] | None:
        """Return the optimizer's state of the embedding, on the ranks that have it."""
        tensor = self._own.steps_on.get(self._confined.embedding)
        if tensor is None:
            return None
        found: dict[str, Any] = self._own.optimizer.state[tensor]
        return found
