"""The untrained state of a model: frozen parameters, and integer buffers such as counts.

Frozen parameters change only when a checkpoint is loaded; only then they are sent. Counts of
batches change with every step, but are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.strategies.inner.gather_scatter import Subgroups, Transport

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class UntrainedState:
    """One rank's part of the untrained state; every method is collective."""

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        *,
        host_tensors: Mapping[str, Tensor] | None,
        device: torch.device,
        subgroups: Subgroups,
    ) -> None:
        """View the result of `Parts.untrained`; rank 0's `host_tensors` hold the same values."""
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
    """Return identity and version of each frozen parameter of a host model."""
    held = host_tensors.values() if host_tensors is not None else ()
    frozen = [t for t in held if isinstance(t, nn.Parameter) and not t.requires_grad]
    return [(id(t), t._version) for t in frozen]
