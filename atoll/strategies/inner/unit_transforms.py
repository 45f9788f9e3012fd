"""Compilation and activation recomputation of a model's units.

Does not import `torch.distributed`, which takes a second, because single processes use this, too.
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
    """Compile the forward pass of each unit, in place; modules, names and parameters stay.

    Single layers are skipped: they contain nothing to fuse.
    """
    for unit in units:
        if any(True for _ in unit.children()):
            unit.forward = torch.compile(unit.forward, backend=backend)


PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operators with expensive results: matrix products and those made of them."""


def apply_recompute(units: Sequence[nn.Module], word: str) -> None:
    """Let units drop their activations and recompute them in the backward pass, in place.

    Random numbers (dropout) are the same as the first time. Units that are a single layer are
    skipped, because they have to keep their input anyway.

    Args:
        units: In the order of the forward pass.
        word: `none`, `full`, `matmul` (all of a unit but its matrix products) or `every:N`.

    Raises:
        ConfigError: the word is unknown.
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
