"""A vision transformer for small images.

Dosovitskiy et al., "An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929, section 3.1:
patches of the image are the tokens of a transformer encoder.

Differs from the paper: mean pooling instead of a class token, and the output layer starts at zero
(both as in Beyer et al., "Better plain ViT baselines", https://arxiv.org/abs/2205.01580).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError
from atoll.models.attention import BLOCK_PLAN, Attention
from atoll.models.classifier import Classifier
from atoll.models.sizes import check_chance, check_heads, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """The size of a :class:`ViT`."""

    channels: int = 1
    """1 for grey images, 3 for colour."""
    image: int = 28
    classes: int = 10
    patch: int = 4
    """Pixels per side of a patch; divides ``image``."""
    layers: int = 4
    width: int = 64
    """Features of a patch; a multiple of ``heads``."""
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Validate; raises ConfigError."""
        names = ("channels", "image", "classes", "patch", "layers", "width", "heads")
        check_positive(self, *names)
        check_heads(width=self.width, heads=self.heads, pairs=False)
        check_chance(self.dropout)
        if self.image % self.patch:
            fits = [side for side in range(1, self.image + 1) if self.image % side == 0]
            nearest = min(fits, key=lambda side: abs(side - self.patch))
            raise ConfigError(
                "the image cannot be cut into patches",
                given=f"image={self.image}, patch={self.patch}",
                expected="patch to divide image",
                remedy=f"try patch={nearest}",
            )


class ViT(Classifier):
    """A classifier of patches; see :class:`ViTConfig` for its sizes."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _Patches(config)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.pool = _Pool()
        self.head = nn.Linear(config.width, config.classes)
        self._initialise()

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        return [self.embedding, *self.blocks, self.norm, self.pool, self.head]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan: by heads and hidden features."""
        return {
            "embedding": "cut",
            **BLOCK_PLAN,
            "norm": "join",
        }

    def _initialise(self) -> None:
        """Initialize matrices by fan-in and fan-out, positions small, the output layer zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1 and name != "embedding.positions":
                nn.init.xavier_uniform_(parameter.view(len(parameter), -1))
        nn.init.normal_(self.embedding.positions, std=0.02)
        nn.init.zeros_(self.head.weight)


class _Patches(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        side = config.image // config.patch
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.positions = nn.Parameter(torch.empty(side * side, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, patches, width)``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return cast(Tensor, self.dropout(tokens + self.positions))


class _Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(
            width, heads=config.heads, causal=False, bias=True, dropout=config.dropout
        )
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, patches, width)`` like ``x``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        hidden = functional.gelu(self.up(self.norm_mlp(x)))
        return x + cast(Tensor, self.dropout(self.down(hidden)))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, width)`` for ``(batch, patches, width)``."""
        return x.mean(dim=1)
