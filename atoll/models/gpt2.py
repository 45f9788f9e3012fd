"""GPT-2: a decoder with learned positions, LayerNorm and biases.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3,
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

Differs from the paper: separate matrices for queries, keys and values (the same function; a slice
of each is some heads), and any context length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.models.attention import BLOCK_PLAN, Attention
from atoll.models.language import LayeredLanguageModel
from atoll.models.sizes import check_chance, check_heads, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """The size of a :class:`GPT2`; the smallest published one has 12, 768, 12 and 1024."""

    vocab_size: int = 256
    """256 for the byte tokenizer."""
    layers: int = 2
    width: int = 64
    """Features of a token; a multiple of ``heads``."""
    heads: int = 4
    context: int = 64
    """Maximum sequence length in tokens."""
    dropout: float = 0.0
    tie: bool = True
    """Whether the output layer shares the embedding's weights."""

    def __post_init__(self) -> None:
        """Validate; raises ConfigError."""
        check_positive(self, "vocab_size", "layers", "width", "heads", "context")
        check_heads(width=self.width, heads=self.heads, pairs=False)
        check_chance(self.dropout)


class GPT2(LayeredLanguageModel):
    """A decoder-only language model; see :class:`GPT2Config` for its sizes."""

    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = _Embedding(config)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.embedding.tokens.weight
        self._initialise()

    def units(self) -> list[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""
        return [self.embedding, *self.blocks, self.norm, self.head]

    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan: by heads, hidden features and vocabulary."""
        return {
            "embedding.tokens": "vocabulary",
            "embedding": "cut",
            **BLOCK_PLAN,
            "head": "vocabulary",
            "norm": "sequence",
        }

    def _initialise(self) -> None:
        """Initialize matrices with standard deviation 0.02, residual outputs smaller with depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                last = name.endswith(("merge.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * self.config.layers) if last else 0.02
                nn.init.normal_(parameter, std=std)


class _Embedding(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``(batch, length, width)`` for ids ``(batch, length)``."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        return cast(Tensor, self.dropout(self.tokens(ids) + self.positions(positions)))


class _Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width = config.width
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(
            width, heads=config.heads, causal=True, bias=True, dropout=config.dropout
        )
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, length, width)`` like ``x``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        hidden = functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + cast(Tensor, self.dropout(self.down(hidden)))
