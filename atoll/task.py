"""What one member trains: model, optimizer, schedule and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.gate import Gate


class Scheduler(Protocol):
    """What sets the learning rate after every step; torch's `LRScheduler` fits."""

    def step(self) -> Any:
        """Set the rate of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take up a state that `state_dict` returned."""
        ...


@dataclass(slots=True)
class Task:
    """One member's training, as strategies see and change it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None = None
    member: str = "w0"
    """Own name, for messages."""
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained by this member."""
    round: int = 0
    """Rounds committed: the next one to join."""
    gate: Gate = field(default_factory=Gate, repr=False)
    """Closed while the state moves; others read it through `gate.still`."""
    _parameters: list[nn.Parameter] = field(init=False, repr=False, default_factory=list)

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters in registration order, a shared one once.

        They are looked for once: what is frozen at the first call stays out.
        """
        if not self._parameters:
            self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        return self._parameters

    def buffers(self) -> list[Tensor]:
        """Return the floating-point buffers that are saved, e.g. running means of BatchNorm."""
        saved = self.model.state_dict(keep_vars=True)
        return [
            buffer
            for name, buffer in self.model.named_buffers()
            if name in saved and buffer.is_floating_point()
        ]

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())
