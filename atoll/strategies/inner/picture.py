"""The whole model in the first rank's main memory, as a picture of what the ranks train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.island.crew import Crew

PULL, PUSH = "pull", "push"
"""Verbs of :class:`atoll.strategies.inner.worker.Worker`."""


class Picture:
    """`Task.elsewhere` of an island's first rank; see :class:`atoll.task.Elsewhere`.

    Both ways are exact, bit for bit. From the thread that trains only.
    """

    def __init__(self, crew: Crew, *, vector: Tensor | None = None) -> None:
        """Take the picture for true.

        Args:
            crew: Who trains.
            vector: What `in_one_piece` returned for all that members agree on.
        """
        self._crew, self._vector = crew, vector
        self._old = False

    def trained(self) -> None:
        """Take note that the ranks went on: the picture is old."""
        self._old = True

    def pull(self) -> None:
        """Bring what training has made of the model into the picture, if it did anything since."""
        if self._old:
            self._crew.call(PULL)
            self._old = False

    def push(self) -> None:
        """Put the picture into the ranks' parts."""
        self._crew.call(PUSH)
        self._old = False

    @property
    def vector(self) -> Tensor | None:
        """The picture's memory; see :meth:`atoll.task.Elsewhere.vector`."""
        return self._vector

    def spoil(self) -> None:
        """Let the next `pull` bring the picture anew: somebody works in its memory."""
        self._old = True


@torch.no_grad()
def in_one_piece(
    tensors: Sequence[Tensor], *, new: Callable[[int], Tensor] = torch.empty
) -> Tensor | None:
    """Let tensors lie one behind the other in one vector, and return it; their numbers stay.

    None, and nothing is moved, if they are not all of fp32 and in main memory.

    Args:
        tensors: Parameters and buffers.
        new: Makes a vector of so many elements.
    """
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return None
    vector = new(sum(tensor.numel() for tensor in tensors))
    pieces = torch.split(vector, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        piece.copy_(tensor.reshape(-1))
        tensor.data = piece.view(tensor.shape)
    return vector
