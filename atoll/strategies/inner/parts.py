"""One rank's part of a model that is spread over an island: what every inner strategy makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Parts(Protocol):
    """A rank's part of a model, ready to train.

    Built by `spread` on every rank from the same whole model. Names are those of the whole model.
    """

    mesh: DeviceMesh
    """All four axes of `atoll.config.AXES`."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what of the whole model's trained parameters is here, in the model's order.

        A plain tensor is the whole parameter; a DTensor says by its placements which part it is. A
        parameter that is on no rank of this pipeline stage is missing.
        """
        ...

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the saved floating-point buffers, by name; equal on all ranks that have them."""
        ...

    def rest(self) -> Mapping[str, Tensor]:
        """Return what else of the model's state is here, by name.

        Frozen parameters, as trained ones lie, and saved buffers that are no floating-point
        numbers, equal on all ranks that have them.
        """
        ...

    def backward(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, summed: bool = True
    ) -> Tensor:
        """Compute gradients of a batch; collective.

        Afterwards gradients are those of the mean loss over the whole batch, times `scale`, on
        every rank: reduced over ranks that hold the same parameter, summed over accumulated parts.

        Args:
            inputs: The island's whole batch, (rows, ...); each rank takes its rows by itself.
            targets: What belongs to it, (rows, ...).
            scale: Of the loss, against underflow in half precision.
            summed: Whether the ranks add up the loss; else the caller does, with what else it has.

        Returns:
            The mean loss over the whole batch without `scale`, a scalar on every rank; if it is not
            `summed`, this rank's share: the shares of all ranks are the mean.

        Raises:
            ConfigError: the rows cannot be dealt out evenly.
        """
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a whole batch without gradients, on every rank; collective.

        The rows need not be divisible: what is missing is filled up and does not count.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        ...
