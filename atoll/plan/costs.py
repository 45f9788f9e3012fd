"""What the units of a model cost to compute, and the stages of a SWARM that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from atoll.strategies.inner.pipeline.cuts import as_tuple, cuts_by_cost

PASSES, PASSES_OF_LAST = 4.0, 3.0
"""Cost of a microbatch at a stage, in forward passes: one forward, the same again before the
backward, and a backward that takes two. The last stage does both at once and recomputes nothing."""


def _attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


_UNKNOWN = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""Operations that torch does not count."""


def unit_flops(units: Sequence[nn.Module], inputs: Tensor) -> list[float]:
    """Return the floating-point operations of each unit's forward pass of these rows.

    Matrix products, convolutions and attention count; embeddings and elementwise operations do not.
    The units may be on fake tensors.
    """
    found: list[float] = []
    values: tuple[Tensor, ...] = (inputs,)
    for unit in units:
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN) as counter:
            values = as_tuple(unit(*values))
        found.append(float(counter.get_total_flops()))
    return found


def work_of(flops: float, *, last: bool) -> float:
    """Return the operations of a stage for both passes of a microbatch."""
    return flops * (PASSES_OF_LAST if last else PASSES)


def swarm_cuts(units: Sequence[nn.Module], flops: Sequence[float], *, stages: int) -> list[int]:
    """Return the units before which to cut, so that the busiest stage has the least work."""
    speeds = [1.0 / work_of(1.0, last=stage == stages - 1) for stage in range(stages)]
    return list(cuts_by_cost(units, flops, stages=stages, speeds=speeds))
