"""A small GPT: the model that the demo, the benchmarks and the examples train.

Pre-norm decoder with rotary positions (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864),
multi-head causal attention and a four-fold MLP; the output layer shares its weights with the
embedding unless told otherwise. Shapes used below:

    batch   sequences                 length  tokens of a sequence, at most ``context``
    width   features of a token       vocab   distinct tokens (256 for bytes)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The size of a :class:`GPT`; the defaults make 115,008 parameters."""

    vocab_size: int = 256
    """Distinct tokens; 256 for the byte tokenizer."""
    layers: int = 2
    """Blocks of attention and MLP."""
    width: int = 64
    """Features of a token; an even multiple of ``heads``."""
    heads: int = 4
    """Attention heads."""
    context: int = 64
    """Longest sequence, in tokens."""
    dropout: float = 0.0
    """Chance that an activation is zeroed while training."""
    tie: bool = True
    """Whether the output layer is the embedding, transposed."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: a size is not positive, ``width`` is no multiple of ``heads``, or
                ``dropout`` is outside 0 <= x < 1.
        """
        for name in ("vocab_size", "layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"the model's {name} is too small",
                    given=getattr(self, name),
                    expected="1 or more",
                )
        pairs = 2 * self.heads  # positions turn pairs of features
        if self.width % pairs:
            raise ConfigError(
                "the model's width cannot be shared by its heads",
                given=f"width={self.width}, heads={self.heads}",
                expected=f"width to be a multiple of {pairs}, twice the heads",
                remedy=f"try width={math.ceil(self.width / pairs) * pairs}",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                "the model's dropout is no chance", given=self.dropout, expected="0 <= dropout < 1"
            )


class GPT(nn.Module):
    """A decoder-only language model; see :class:`GPTConfig` for its sizes."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the model with fresh weights from torch's current random state."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        tables = _rotation(config.context, config.width // config.heads)
        self.blocks = nn.ModuleList(_Block(config, *tables) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.embedding.weight
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)`` for int64 token ids ``(batch, length)``.

        Raises:
            ConfigError: the sequences are longer than the model's context.
        """
        length = ids.shape[1]
        if length > self.config.context:
            raise ConfigError(
                "sequences longer than the model's context",
                given=f"{length} tokens",
                expected=f"at most {self.config.context}",
                remedy=f"cut them, or build the model with context={length}",
            )
        x = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar; both ``(batch, length)``."""
        return self.criterion(self(ids), targets)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ``(batch, length, vocab)``, in nats per token."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def units(self) -> list[nn.Module]:
        """Return embedding, blocks and output layer: one after the other they are the model."""
        front = nn.Sequential(OrderedDict(embedding=self.embedding, dropout=self.dropout))
        tail = nn.Sequential(OrderedDict(norm=self.norm, head=self.head))
        return [front, *self.blocks, tail]

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the prompt followed by sampled tokens, int64 ``(batch, length + tokens)``.

        Args:
            prompt_ids: ``(batch, length)``, at least one token; only the last ``context`` are seen.
            tokens: How many tokens to add.
            temperature: 0 takes the likeliest token; below 1 sharpens, above 1 flattens.
            top_k: Sample among this many likeliest tokens only.
            generator: Source of randomness on the model's device.

        Raises:
            ConfigError: the prompt is empty, or a number is negative.
        """
        if prompt_ids.dim() != 2 or prompt_ids.shape[1] < 1:
            raise ConfigError(
                "nothing to continue",
                given=f"a prompt of shape {tuple(prompt_ids.shape)}",
                expected="(batch, length) with length of 1 or more",
            )
        if temperature < 0 or tokens < 0 or (top_k is not None and top_k < 1):
            raise ConfigError(
                "cannot generate with these settings",
                given=f"tokens={tokens}, temperature={temperature}, top_k={top_k}",
                expected="tokens and temperature of 0 or more, top_k of 1 or more",
            )
        was_training = self.training
        self.eval()
        ids = prompt_ids
        for _ in range(tokens):
            logits = self(ids[:, -self.config.context :])[:, -1]
            ids = torch.cat((ids, _sample(logits, temperature, top_k, generator)), dim=1)
        self.train(was_training)
        return ids

    @property
    def num_parameters(self) -> int:
        """Trained numbers, a shared one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations to train on one token, forward and backward.

        6 per weight of every matrix product (the output layer's too, the embedding lookup not),
        plus ``6 * layers * context * width`` for causal attention over half the context on average.
        """
        config = self.config
        per_block = 12 * config.width * config.width
        weights = config.layers * per_block + config.vocab_size * config.width
        return 6.0 * weights + 6.0 * config.layers * config.context * config.width

    def _initialise(self) -> None:
        """Draw the weights: embeddings small, matrices by fan-in, residual outputs zero.

        A block that starts by adding nothing lets the bigram path learn first, at any depth.
        Measured on 1.6 M tokens of Python source, 120 k parameters, AdamW 4e-3, held-out nats per
        byte: std 0.02 everywhere with residual outputs scaled by depth 1.93; fan-in with scaled
        outputs 1.98; fan-in with zero outputs 1.68, and with rotary positions 1.52 (learned
        ones before).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            if name.endswith(("merge.weight", "down.weight")):
                nn.init.zeros_(parameter)
            elif "blocks" in name:
                nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[1]))
            else:
                nn.init.normal_(parameter, std=0.02)


class _Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added to the stream."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: GPTConfig, cosines: Tensor, sines: Tensor) -> None:
        super().__init__()
        width = config.width
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        self.rate = config.dropout
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with this block's two contributions added, ``(batch, length, width)``."""
        x = x + self.dropout(self._attend(self.norm_attention(x)))
        hidden = functional.gelu(self.up(self.norm_mlp(x)))
        return x + cast(Tensor, self.dropout(self.down(hidden)))

    def _attend(self, x: Tensor) -> Tensor:
        # Heads come first among the features, so that a slice of the weight's rows is some heads,
        # whole. How many heads are here, and how long the sequence is, only the product knows: a
        # rank of tensor parallelism has some of the heads, and maybe a piece of the sequence in x.
        mixed = self.queries_keys_values(x)
        length = mixed.shape[1]
        cosines, sines = self.cosines[:length], self.sines[:length]
        mixed = mixed.view(*mixed.shape[:2], -1, 3, cosines.shape[-1])
        queries, keys, values = mixed.unbind(3)
        attended = functional.scaled_dot_product_attention(
            _turned(queries, cosines, sines).transpose(1, 2),
            _turned(keys, cosines, sines).transpose(1, 2),
            values.transpose(1, 2),
            dropout_p=self.rate if self.training else 0.0,
            is_causal=True,
        )
        return cast(Tensor, self.merge(attended.transpose(1, 2).flatten(2)))


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys ``(batch, length, heads, features)`` turned by their positions."""
    return x * cosines + x.roll(x.shape[-1] // 2, dims=-1) * sines


def _rotation(context: int, features: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines that turn pair ``(i, i + features/2)`` with position.

    The slowest pair turns once in about ten contexts, so that no two distances look alike.

    Returns:
        Two tensors ``(context, 1, features)``.
    """
    base = 2.0 * context
    half = features // 2
    rates = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * rates
    cosines = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cosines[:, None], sines[:, None]


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Return one token id per row of ``(batch, vocab)`` logits, ``(batch, 1)``."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept, _ = logits.topk(top_k)
        logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
    chances = logits.softmax(dim=-1)
    return torch.multinomial(chances, 1, generator=generator)
