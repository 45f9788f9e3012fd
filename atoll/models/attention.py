"""Multi-head attention with separate query, key and value matrices.

Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762, section 3.2; keys
and values shared by groups of heads as in Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from atoll.models.rotation import turned

BLOCK_PLAN: Mapping[str, str] = MappingProxyType(
    {
        "blocks.*.norm_attention": "sequence",
        "blocks.*.norm_mlp": "sequence",
        "blocks.*.dropout": "sequence",
        "blocks.*.attention.queries": "column",
        "blocks.*.attention.keys": "column",
        "blocks.*.attention.values": "column",
        "blocks.*.attention.merge": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    }
)
"""Tensor-parallel plan of blocks with this attention and an MLP, see `Trainable.tensor_plan`."""


class Attention(nn.Module):
    """Self-attention, causal or full.

    The number of heads is read from the projections, because a tensor-parallel rank has only some.
    """

    cosines: Tensor | None
    sines: Tensor | None

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int = 0,
        causal: bool,
        bias: bool,
        dropout: float = 0.0,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Create the four projections.

        Args:
            width: Features of a token; a multiple of `heads`.
            heads: Attention heads.
            kv_heads: Key/value heads, a divisor of `heads`; 0: the same number.
            causal: Whether a token only attends to itself and earlier ones.
            bias: Whether the projections have biases.
            dropout: Probability that an attention weight is zeroed in training.
            rotation: Rotary tables; None: positions are encoded elsewhere.
        """
        super().__init__()
        self.features = width // heads
        self.grouped = kv_heads not in (0, heads)
        self.causal, self.rate = causal, dropout
        kv_width = (kv_heads or heads) * self.features
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, kv_width, bias=bias)
        self.values = nn.Linear(width, kv_width, bias=bias)
        self.merge = nn.Linear(width, width, bias=bias)
        cosines, sines = rotation if rotation is not None else (None, None)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, ``(batch, length, width)`` like `x`."""
        queries, keys, values = (
            part.view(*part.shape[:2], -1, self.features)
            for part in (self.queries(x), self.keys(x), self.values(x))
        )
        if self.cosines is not None and self.sines is not None:
            # Read the length after the projections: with sequence parallelism, x is only a part of
            # the sequence.
            length = queries.shape[1]
            cosines, sines = self.cosines[:length], self.sines[:length]
            queries, keys = turned(queries, cosines, sines), turned(keys, cosines, sines)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            dropout_p=self.rate if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.grouped,
        )
        return cast(Tensor, self.merge(attended.transpose(1, 2).flatten(2)))
