"""Sharded parameters that are gathered in half precision, with all digits where these matter.

Sharded masters, their gradients and sums stay fp32: only what is gathered for the time of a unit is
half as long. Matrices would be multiplied in it anyway. Norms and embeddings compute in fp32 as
they do under autocast, from weights that have been rounded.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def gathered_in(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return what units are gathered in; None: what their parameters are in."""
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def keep_digits(module: nn.Module) -> None:
    """Let norms and embeddings of a module give fp32 whatever their weights are in; in place."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_hook(_widened)
        elif isinstance(part, NORMS):
            vars(part)["forward"] = functools.partial(_in_fp32, part)


def _widened(part: nn.Module, given: tuple[Any, ...], outputs: Tensor) -> Tensor:
    return outputs.float()


def _in_fp32(part: nn.Module, *given: Any, **named: Any) -> Any:
    """Return what a norm makes of its inputs with its weights in fp32."""
    wide = copy.copy(part)
    own = part._parameters.items()
    wide._parameters = {name: None if p is None else p.float() for name, p in own}  # type: ignore[misc]
    return type(part).forward(wide, *given, **named)
