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


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices that are neither embeddings nor the output layer.

    The output layer is the last linear one, if it has the shape of an embedding. Others may have
    that shape by chance: 64 to 256 features beside an embedding of 256 bytes. So ask for them of
    the whole model: a stage of it may have no embedding.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(module.weight) for module in embeddings}
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    shapes = {module.weight.shape for module in embeddings}
    outside |= {id(module.weight) for module in last if module.weight.shape in shapes}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in outside
    ]
