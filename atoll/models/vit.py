"""A vision transformer for small images.

Dosovitskiy et al., "An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929, section 3.1:
the image is cut into patches, each patch is a token, and an encoder like that of a language model
without a mask reads them.

Differs from the paper: the answer comes from the mean over all tokens instead of an extra one, and
the output layer starts at zero (both as in Beyer et al., "Better plain ViT baselines",
https://arxiv.org/abs/2205.01580).
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
    """Of an image: 1 for grey, 3 for colours."""
    image: int = 28
    """Pixels along one side."""
    classes: int = 10
    """Distinct answers."""
    patch: int = 4
    """Pixels along one side of a patch; divides ``image``."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 64
    """Features of a patch; a multiple of ``heads``."""
    heads: int = 4
    """Attention heads."""
    dropout: float = 0.0
    """Chance that an activation is zeroed while training."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: a size is not positive, ``width`` is no multiple of ``heads``, ``patch``
                does not divide ``image``, or ``dropout`` is outside 0 <= x < 1.
        """
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
        """Build the model with fresh weights from torch's current random state."""
        super().__init__()
        self.config = config
        self.embedding = _Patches(config)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.pool = _Pool()
        self.head = nn.Linear(config.width, config.classes)
        self._initialise()

    def units(self) -> list[nn.Module]:
        """Return patches, blocks, norm, pool and output layer: one after the other they are it."""
        return [self.embedding, *self.blocks, self.norm, self.pool, self.head]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return how ranks may share its matrices: by heads and hidden features."""
        return {
            "embedding": "cut",
            **BLOCK_PLAN,
            "norm": "join",
        }

    def _initialise(self) -> None:
        """Draw matrices evenly by fan-in and fan-out, positions small; the output layer is zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1 and name != "embedding.positions":
                nn.init.xavier_uniform_(parameter.view(len(parameter), -1))
        nn.init.normal_(self.embedding.positions, std=0.02)
        nn.init.zeros_(self.head.weight)


class _Patches(nn.Module):
    """A vector for each patch, with one for its place added."""

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
    """Attention, then MLP, each on a normalised copy and added to the stream."""

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
        """Return ``x`` with this block's two contributions added, ``(batch, patches, width)``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        hidden = functional.gelu(self.up(self.norm_mlp(x)))
        return x + cast(Tensor, self.dropout(self.down(hidden)))


class _Pool(nn.Module):
    """The mean over all patches."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, width)`` for ``(batch, patches, width)``."""
        return x.mean(dim=1)
