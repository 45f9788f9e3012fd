"""The step of methods that are optimizers themselves: rate and decay are the inner optimizer's."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.strategies.delta import Flat
from atoll.task import Task


@torch.no_grad()
def own_step(task: Task, flat: Flat, direction: Tensor, *, decay: bool = True) -> None:
    """Take `theta = (1 - lr * weight_decay) * theta - lr * direction`, and leave no gradients.

    The inner optimizer's groups say `lr` and `weight_decay`, so schedules hold. It finds nothing to
    do afterwards: a parameter without a gradient is left alone, by clipping too.

    Args:
        task: Its parameters are moved, and their gradients taken away.
        flat: The parameters.
        direction: One flat vector, in the order of `flat`.
        decay: Whether to shrink the parameters by `weight_decay`.
    """
    by_tensor = dict(zip(map(id, flat.tensors), flat.views(direction), strict=True))
    for group in task.optimizer.param_groups:
        rate = float(group["lr"])
        shrink = rate * float(group.get("weight_decay", 0.0)) if decay else 0.0
        for parameter in group["params"]:
            part = by_tensor.get(id(parameter))
            if part is None:
                continue
            if shrink:
                parameter.mul_(1.0 - shrink)
            parameter.add_(part.to(parameter.device, parameter.dtype), alpha=-rate)
            parameter.grad = None
