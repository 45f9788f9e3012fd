"""A recurrent cell in one operator, which torch asks of every accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def gru_cell(
    inputs: Tensor, hidden: Tensor, state: Tensor,
    input_bias: Tensor | None = None, hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the next state [B, H], and what `gru_cell_backward` needs."""
    if input_bias is not None and hidden_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    (ir, iz, new), (hr, hz, hn) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    n = torch.tanh(new + r * hn)
    return n + z * (state - n), torch.cat([r, z, n, state, hn], 1)


def gru_cell_backward(
    gradient: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of inputs, hidden, state and biases."""
    r, z, n, state, hn = kept.chunk(5, 1)
    new = gradient * (1 - z) * (1 - n * n)
    update = gradient * (state - n) * z * (1 - z)
    reset = new * hn * r * (1 - r)
    inputs, hidden = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, gradient * z, *biases


CELLS = {"_thnn_fused_gru_cell": gru_cell, "_thnn_fused_gru_cell_backward": gru_cell_backward}
"""Operator -> what computes it in main memory, where torch has none."""
