"""Base class of image classifiers.

Shapes: `batch` images, `channels` (1 grey, 3 colour), `image` pixels per side, `classes`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """A model that predicts the class of an image."""

    @abstractmethod
    def units(self) -> Sequence[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""

    @abstractmethod
    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan; see `Trainable`."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes)`` for images ``(batch, channels, image, image)``."""
        x = images
        for unit in self.units():
            x = unit(x)
        return x

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ``(batch, classes)``, in nats per image."""
        return functional.cross_entropy(outputs, targets)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per image; targets are int64 ``(batch,)``."""
        return self.criterion(self(images), targets)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())
