"""A small residual network for images of 8 to 64 pixels a side.

He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385, section
4.2: three stages of 1, 2 and 4 times the first width, halving the image twice.

Differs from the paper: a shortcut that changes the shape is a 1x1 convolution (the paper's option
B), the last scale of a block starts at zero (Goyal et al., https://arxiv.org/abs/1706.02677,
section 5.1), and the default is group normalization (Wu and He, https://arxiv.org/abs/1803.08494):
members see different data, so averaged running statistics of batch norm fit none of them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError, unknown
from atoll.models.classifier import Classifier
from atoll.models.sizes import check_positive

NORMS = ("group", "batch")
_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """The size of a :class:`ResNet`; it has ``6 * blocks + 2`` layers."""

    channels: int = 1
    """1 for grey images, 3 for colour."""
    classes: int = 10
    blocks: int = 1
    width: int = 16
    """Channels of the first stage."""
    norm: str = "group"
    """`group` or `batch`."""
    groups: int = 8
    """Channel groups of `group` normalization; divides ``width``."""

    def __post_init__(self) -> None:
        """Validate; raises ConfigError."""
        check_positive(self, "channels", "classes", "blocks", "width", "groups")
        if self.norm not in NORMS:
            raise unknown("norm of model 'resnet'", self.norm, NORMS)
        if self.norm == "group" and self.width % self.groups:
            raise ConfigError(
                "the model's groups do not divide its width",
                given=f"width={self.width}, groups={self.groups}",
                expected=f"width to be a multiple of {self.groups}",
                remedy=f"try width={-(-self.width // self.groups) * self.groups}",
            )


class ResNet(Classifier):
    """A convolutional classifier; see :class:`ResNetConfig` for its sizes."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = _Stem(config)
        widths = [config.width << stage for stage in range(_STAGES)]
        blocks, before = [], config.width
        for stage, width in enumerate(widths):
            for number in range(config.blocks):
                stride = 2 if stage and not number else 1
                blocks.append(_Block(config, before, width, stride=stride))
                before = width
        self.blocks = nn.ModuleList(blocks)
        self.pool = _Pool()
        self.head = nn.Linear(before, config.classes)
        self._initialise()

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        return [self.stem, *self.blocks, self.pool, self.head]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return an empty plan: the convolutions are small and not split."""
        return {}

    def _initialise(self) -> None:
        """Initialize convolutions by fan-out (He et al., https://arxiv.org/abs/1502.01852)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, _Block):
                nn.init.zeros_(cast(Tensor, module.norm_second.weight))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class _Stem(nn.Module):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.convolution = _convolution(config.channels, config.width)
        self.norm = _norm(config, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, width, image, image)``."""
        return functional.relu(self.norm(self.convolution(x)))


class _Block(nn.Module):
    def __init__(self, config: ResNetConfig, before: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.first = _convolution(before, width, stride=stride)
        self.norm_first = _norm(config, width)
        self.second = _convolution(width, width)
        self.norm_second = _norm(config, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; half the size with a stride of 2."""
        inside = functional.relu(self.norm_first(self.first(x)))
        return functional.relu(self.shortcut(x) + self.norm_second(self.second(inside)))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, channels)`` for ``(batch, channels, height, width)``."""
        return x.mean(dim=(2, 3))


def _convolution(before: int, after: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)


def _norm(config: ResNetConfig, channels: int) -> nn.Module:
    if config.norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(config.groups, channels)
