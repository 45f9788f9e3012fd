"""One token after the other through the built-in GPT, remembering keys and values."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.models import GPT


class Decoder:
    """Feeds a batch of sequences to a model, the same position of all at a time.

    Equal to the model's own forward pass over whole sequences, at a cost per token that does not
    grow with a second pass over what came before.

    Args:
        model: In evaluation mode, or without dropout.
        batch: Sequences.
        length: Most tokens of each; at most the model's context.
    """

    def __init__(self, model: GPT, *, batch: int, length: int) -> None:
        config = model.config
        self._model = model
        shape = (batch, config.heads, length, config.width // config.heads)
        self._keys = [torch.empty(shape) for _ in range(config.layers)]
        self._values = [torch.empty(shape) for _ in range(config.layers)]
        self._position = 0

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Take the next token of every sequence, [B] int64; return the logits after it, [B, V]."""
        model, at = self._model, self._position
        x = model.embedding(ids)
        for number, block in enumerate(model.blocks):
            x = self._block(block, number, x, at)
        self._position += 1
        return cast(Tensor, model.head(model.norm(x)))

    def _block(self, block: torch.nn.Module, number: int, x: Tensor, at: int) -> Tensor:
        heads = self._model.config.heads
        mixed = block.queries_keys_values(block.norm_attention(x))  # type: ignore[operator]
        mixed = mixed.view(len(x), heads, 3, -1)
        cosines, sines = block.cosines[at, 0], block.sines[at, 0]  # type: ignore[index]
        turned = mixed[:, :, :2]
        turned = turned * cosines + turned.roll(turned.shape[-1] // 2, dims=-1) * sines
        keys, values = self._keys[number], self._values[number]
        keys[:, :, at], values[:, :, at] = turned[:, :, 1], mixed[:, :, 2]
        attended = functional.scaled_dot_product_attention(
            turned[:, :, 0, None], keys[:, :, : at + 1], values[:, :, : at + 1]
        )
        x = x + block.merge(attended.reshape(len(x), -1))  # type: ignore[operator]
        hidden = functional.gelu(block.up(block.norm_mlp(x)))  # type: ignore[operator]
        return x + cast(Tensor, block.down(hidden))  # type: ignore[operator]


def hidden_states(model: GPT, ids: Tensor, *, added: Tensor | None = None) -> Tensor:
    """Return what a model makes of each position before its output layer, [B, L, width].

    Args:
        model: The model.
        ids: [B, L], int64.
        added: [B, width], added to every token of a row; None: nothing.
    """
    x: Tensor = model.embedding(ids)
    if added is not None:
        x = x + added[:, None]
    for block in model.blocks:
        x = block(x)
    return cast(Tensor, model.norm(x))
