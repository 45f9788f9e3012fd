"""Llama: the decoder architecture of most open language models.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
https://arxiv.org/abs/2302.13971: RMSNorm before attention and MLP (Zhang and Sennrich,
https://arxiv.org/abs/1910.07467), rotary positions (https://arxiv.org/abs/2104.09864), SwiGLU
(Shazeer, https://arxiv.org/abs/2002.05202), no biases; optionally grouped-query attention
(https://arxiv.org/abs/2305.13245).

Differs from the paper: the output layer shares the embedding's weights by default, as in small
models; residual outputs are initialized smaller with depth, as in GPT-2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError
from atoll.models.attention import BLOCK_PLAN, Attention
from atoll.models.contract import ResidualStream
from atoll.models.language import LayeredLanguageModel
from atoll.models.rotation import rotation_tables
from atoll.models.sizes import check_chance, check_deviation, check_heads, check_positive

_HIDDEN_MULTIPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The size of a :class:`Llama`."""

    vocab_size: int = 256
    """256 for the byte tokenizer."""
    layers: int = 2
    width: int = 64
    """Features of a token; an even multiple of ``heads``."""
    heads: int = 4
    kv_heads: int = 0
    """Key/value heads, a divisor of ``heads``; 0: the same number."""
    hidden: int = 0
    """Features inside the MLP; 0: 8/3 of ``width``, rounded up to a multiple of 32."""
    context: int = 64
    """Maximum sequence length in tokens."""
    theta: float = 10_000.0
    """Base of the rotary positions; larger for long contexts."""
    dropout: float = 0.0
    tie: bool = True
    """Whether the output layer shares the embedding's weights."""
    embedding_std: float = 0.02
    """Standard deviation of the embedding at the start."""

    def __post_init__(self) -> None:
        """Validate; raises ConfigError."""
        check_positive(self, "vocab_size", "layers", "width", "heads", "context", "theta")
        check_heads(width=self.width, heads=self.heads, pairs=True)
        check_chance(self.dropout)
        check_deviation(self.embedding_std)
        if self.kv_heads < 0 or (self.kv_heads and self.heads % self.kv_heads):
            fits = [count for count in range(1, self.heads + 1) if self.heads % count == 0]
            raise ConfigError(
                "heads is not a multiple of kv_heads",
                given=f"heads={self.heads}, kv_heads={self.kv_heads}",
                expected=f"kv_heads of {', '.join(map(str, fits))}, or 0 for as many",
            )
        if self.hidden < 0:
            raise ConfigError(
                "the model's hidden is too small", given=self.hidden, expected="0 or more"
            )

    @property
    def inside(self) -> int:
        """Features inside the MLP, with the default resolved."""
        return self.hidden or math.ceil(8 * self.width / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE


class Llama(LayeredLanguageModel):
    """A decoder-only language model; see :class:`LlamaConfig` for its sizes."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        features = config.width // config.heads
        rotation = rotation_tables(config.context, features, base=config.theta)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config, rotation) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.embedding.weight
        self._initialise()

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        return [self.embedding, self.dropout, *self.blocks, self.norm, self.head]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan: by heads, hidden features and vocabulary."""
        return {
            "embedding": "vocabulary",
            "dropout": "cut",
            **BLOCK_PLAN,
            "blocks.*.gate": "column",
            "head": "vocabulary",
            "norm": "sequence",
        }

    def residual_stream(self) -> ResidualStream:
        """Return what writes the residual stream."""
        return ResidualStream("embedding", ("blocks.*.attention.merge", "blocks.*.down"))

    def _initialise(self) -> None:
        """Initialize with standard deviation 0.02, but for embedding and residual outputs."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            last = name.endswith(("merge.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if last else 0.02
            embeds = parameter is self.embedding.weight
            nn.init.normal_(parameter, std=self.config.embedding_std if embeds else std)


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig, rotation: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(
            config.width, heads=config.heads, kv_heads=config.kv_heads, causal=True, bias=False,
            dropout=config.dropout, rotation=rotation,
        )  # fmt: skip
        self.norm_mlp = nn.RMSNorm(config.width, eps=1e-5)
        self.gate = nn.Linear(config.width, config.inside, bias=False)
        self.up = nn.Linear(config.width, config.inside, bias=False)
        self.down = nn.Linear(config.inside, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, length, width)`` like ``x``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        normed = self.norm_mlp(x)
        hidden = functional.silu(self.gate(normed)) * self.up(normed)
        return x + cast(Tensor, self.dropout(self.down(hidden)))
