"""Compile the units of a model, or compute their activations again in the backward pass.

One process needs this too, so it loads nothing of `torch.distributed`: that takes a second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from atoll.config.train_checks import recomputed_every


def apply_compile(units: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Let the forward pass of each unit go through `torch.compile`.

    It is done in place: modules, names and parameters stay as they are. Single layers are left
    alone: there is nothing in them to put together.
    """
    for unit in units:
        if any(True for _ in unit.children()):
            unit.forward = torch.compile(unit.forward, backend=backend)


PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operators whose results are dear to compute: matrix products and what is made of them."""


def apply_recompute(units: Sequence[nn.Module], word: str) -> None:
    """Let units forget their activations, and compute them again when gradients are due.

    Random numbers (dropout) come out as they did the first time. It is done in place: modules,
    names and parameters stay as they are. A unit that is a single layer has to keep its input
    anyway and is left alone.

    Args:
        units: In the order of the forward pass.
        word: `none`, `full`, `matmul` (all of a unit but its matrix products) or `every:N`.

    Raises:
        ConfigError: there is no such word.
    """
    every = recomputed_every(word)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if word == "matmul":
        options["context_fn"] = _keeping_products
    forgetful = torch.utils.checkpoint.checkpoint
    compound = [unit for unit in units if any(True for _ in unit.children())]
    for unit in compound[::every] if every else ():
        unit.forward = functools.partial(forgetful, unit.forward, **options)


def _keeping_products() -> Any:
    """Return the contexts of a pass that keeps the results of matrix products."""
    ops: Any = torch.ops.aten
    known = [getattr(ops, name).default for name in PRODUCTS if hasattr(ops, name)]
    contexts: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return contexts(known)
