"""The gradients of a model as dense tensors, also those of sparse embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.task import Task


class Gradients:
    """The gradients of a task's trained parameters, dense while members combine them.

    `nn.Embedding(sparse=True)` has sparse gradients. Each member touches other rows of it, so what
    members exchange is dense. The optimizer then gets a sparse gradient again, because SparseAdam
    accepts no other: of the rows in which a number of the combined gradient is not zero. Those are
    the same on every member.
    """

    def __init__(self, task: Task) -> None:
        """Find the parameters whose gradients are sparse."""
        self._parameters = task.parameters()
        self._sparse = {
            id(module.weight): 1
            for module in task.model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        """Number of sparse dimensions, by parameter; known also where a member's step has no
        gradient."""

    def dense(self) -> list[Tensor]:
        """Make every gradient dense, zeros where there is none, and return them."""
        found = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or gradient.is_conj():
                if gradient is not None and gradient.is_sparse:
                    self._sparse[id(parameter)] = gradient.sparse_dim()
                gradient = parameter.grad = dense_gradient(parameter)
            else:
                self._sparse.pop(id(parameter), None)  # e.g. tied to an output layer
            found.append(gradient)
        return found

    def restore_layout(self) -> None:
        """Make those gradients sparse again that were before `dense`."""
        for parameter in self._parameters if self._sparse else ():
            dimensions = self._sparse.get(id(parameter))
            if dimensions is not None and parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(dimensions)


def dense_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient as a dense tensor, zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.resolve_conj()  # a lazy conjugate has no real view
