"""How large the state is that a newcomer takes over, by the parts that its donor serves."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from atoll.config import JobSpec
from atoll.strategies.resolve import Resolved

if TYPE_CHECKING:
    from atoll.forecast.workload import Workload


def newcomer_bytes(spec: JobSpec, workload: Workload, resolved: Resolved) -> int:
    """Return the bytes of the tensors that a newcomer loads, without allocating them.

    The common state, what the method keeps beside it, and a donor's optimizer after a step.
    """
    import torch

    from atoll.codec.registry import make_codec
    from atoll.group.single import SingleGroup
    from atoll.task import Task
    from atoll.train.optim.optimizers import build_optimizer
    from atoll.train.state.committed import CommittedState

    outer, group = resolved.build(), SingleGroup()
    group.aggregation = resolved.aggregation
    with torch.device("meta"):
        model: Any = copy.deepcopy(workload.model)  # its gradients are not wanted elsewhere
        optimizer = build_optimizer(model, spec.train)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        for rates in optimizer.param_groups:  # there are no fused kernels for shapes alone
            rates |= {"fused": False, "foreach": False}
        optimizer.step()
        task = Task(model, optimizer, member="w0", last=spec.train.steps)
        outer.setup(task, group=group, codec=make_codec(resolved.codec))
        parts = CommittedState(task, outer).parts()
    return sum(t.nbytes for part in parts for t in part.tensors.values())
