"""Base class of image classifiers: the loss.

Shapes used by all of them:

    batch     images                   channels  1 for grey, 3 for colours
    image     pixels along one side    classes   distinct answers
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
        """Return the modules that are, one after the other, the forward pass."""

    @abstractmethod
    def tensor_plan(self) -> Mapping[str, str]:
        """Return how ranks may share its matrices; see `Trainable`."""

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
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())
