"""What of a model's state is not trained: frozen parameters, and buffers that count something.

Frozen parameters change only from outside, when a checkpoint is put back: they cross the island
then, and in no round. Counts of batches change with every step; they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.strategies.inner.gather_scatter import Subgroups, Transport

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""


def untrained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's frozen parameters, and saved buffers of no floating-point type, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    frozen: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    counts = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and not buffer.is_floating_point()
    }
    return frozen | counts


class UntrainedState:
    """One rank's part of it; every method is collective."""

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        *,
        host_tensors: Mapping[str, Tensor] | None,
        device: torch.device,
        subgroups: Subgroups,
    ) -> None:
        """Look at what is here.

        Args:
            parts: As `Parts.rest` returns it.
            host_tensors: On the first rank: the whole model, which is what parts are of now.
            device: What tensors travel on.
            subgroups: Groups that are there already.
        """
        self._device = device
        frozen = {n: t for n, t in parts.items() if isinstance(t, nn.Parameter)}
        counts = {n: t for n, t in parts.items() if n not in frozen}
        self._frozen = Transport(frozen, device=device, subgroups=subgroups)
        self._counts = Transport(counts, device=device, subgroups=subgroups)
        self._dealt = _versions(host_tensors)

    def gather(self, host_tensors: Mapping[str, Tensor] | None) -> None:
        """Copy the counts into rank 0's tensors."""
        for name, whole in self._counts.gather():
            if host_tensors is not None:
                host_tensors[name].detach().copy_(whole)

    def deal(self, host_tensors: Mapping[str, Tensor] | None) -> None:
        """Copy rank 0's tensors into the parts; frozen ones only if they have changed."""
        self._counts.deal(host_tensors)
        state = _versions(host_tensors)
        changed = torch.tensor(state != self._dealt, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(changed, src=0)
        if bool(changed):
            self._frozen.deal(host_tensors)
        self._dealt = state


def _versions(host_tensors: Mapping[str, Tensor] | None) -> list[tuple[int, int]]:
    """Return which frozen parameters a host model has, and how often they have changed by now."""
    held = host_tensors.values() if host_tensors is not None else ()
    frozen = [t for t in held if isinstance(t, nn.Parameter) and not t.requires_grad]
    return [(id(t), t._version) for t in frozen]
