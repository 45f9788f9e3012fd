"""What training asks of a model: its criterion, and the tensors that it keeps but does not train.

Does not import `torch.distributed`, which takes half a second, because commands that check a job,
and members of a SWARM, use this, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.task import is_inexact

Criterion = Callable[[Any, Tensor], Tensor]


def criterion_of(model: nn.Module) -> Criterion:
    """Return a model's criterion on outputs and targets; raises ConfigError if it has none."""
    criterion: Any = getattr(model, "criterion", None)
    if not callable(criterion):
        raise ConfigError(
            "the model does not define its loss", given=type(model).__name__,
            expected="a method criterion(outputs, targets) that returns the mean loss",
        )  # fmt: skip
    found: Criterion = criterion
    return found


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the inexact buffers that a model's checkpoints contain, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and is_inexact(buffer)
    }


def untrained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's frozen parameters and saved buffers that are not inexact, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    frozen: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    counts = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and not is_inexact(buffer)
    }
    return frozen | counts
