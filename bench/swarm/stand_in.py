"""A model whose passes take the time of a member's speed without using the processor.

Six members share the cores of one machine, so that real compute would measure the machine. Each
block waits instead; everything else (leases, paths, messages, gradients, rounds) is the real thing.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_S = 0.1
"""A block's forward pass of one microbatch on a member of slowness 1; its backward pass takes 1.5
times as long, 2.5 with the forward pass that a stage repeats."""
SLOWNESS = (1.0, 2.0, 3.0)
"""Of the members w0, w1, w2, then again."""


def slowness() -> float:
    """Return how many times longer this process takes."""
    member = os.environ.get("ATOLL_MEMBER", "w0")
    return SLOWNESS[int(member.strip("w") or 0) % len(SLOWNESS)]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S * slowness())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(1.5 * FORWARD_S * slowness())
        return gradients[0]


class Block(nn.Module):
    """A layer, (rows, tokens) or (rows, tokens, width) in, and the wait."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and wait."""
        out: Tensor = self.layer(x)
        return _Wait.apply(out)  # type: ignore[no-any-return,no-untyped-call]


def tower(*, vocab_size: int, width: int = 64, blocks: int = 2, context: int) -> nn.Sequential:
    """Return blocks of equal waits."""
    middle = [Block(nn.Linear(width, width)) for _ in range(blocks - 2)]
    first, last = Block(nn.Embedding(vocab_size, width)), Block(nn.Linear(width, vocab_size))
    return nn.Sequential(first, *middle, last)
