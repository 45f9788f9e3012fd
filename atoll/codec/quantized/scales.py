"""Scales of blocks in float16, in units of a power of two that is stored in the packet.

float16 alone ends at 6e-8, and pseudo-gradients of 1e-6 have scales of 1e-8. The unit is chosen so
that the largest scale is 2**14 to 2**15 units: every scale down to 2e-9 of the largest keeps its 11
bits, and those below 2e-12 of the largest become zero.

Layout, little endian:

  offset    size    field
  0         4       unit, float32, a power of two
  4         2*m     scales, float16, in units

A scale that is not finite becomes NaN: its block decodes to NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

HEAD_BYTES = 4
SCALE_BYTES = 2
_TOP = 15
"""The largest scale is below 2**15 units."""
_LOWEST = -126 + 24
"""Exponent of the smallest unit, with which a scale times the unit is never subnormal."""


def scales_bytes(blocks: int) -> int:
    """Return the bytes of `blocks` scales with their unit; 0 for none."""
    return HEAD_BYTES + SCALE_BYTES * blocks if blocks else 0


def write_scales(scales: Tensor, *, out: memoryview, upwards: bool = False) -> Tensor:
    """Write scales and return them as the decoder reads them, float32, shape (m,).

    Args:
        scales: Float32, not negative, shape (m,), m > 0.
        out: Output of `scales_bytes(m)` bytes.
        upwards: Round away from zero, for codecs that need a scale at least as large as given.
    """
    values = scales.numpy()
    finite = np.isfinite(values)
    largest = float(values[finite].max()) if finite.any() else 0.0
    exponent = math.frexp(largest)[1] - _TOP if largest > 0 else 0
    unit = np.float32(2.0 ** max(exponent, _LOWEST))
    with np.errstate(over="ignore", invalid="ignore"):
        relative = np.where(finite, values, np.float32(np.nan)) / unit
        halves = relative.astype("<f2")
        if upwards:
            short = halves.astype(np.float32) < relative
            halves[short] = np.nextafter(halves[short], np.float16(np.inf))
    np.frombuffer(out, dtype=np.uint8)[:HEAD_BYTES] = np.frombuffer(
        unit.astype("<f4").tobytes(), dtype=np.uint8
    )
    target = np.frombuffer(out, dtype="<f2", offset=HEAD_BYTES, count=len(values))
    np.copyto(target, halves)
    return torch.from_numpy(halves.astype(np.float32) * unit)


def read_scales(data: Any, blocks: int) -> Tensor:
    """Return the scales at the start of a buffer, float32, shape (blocks,); blocks > 0."""
    unit = float(np.frombuffer(data, dtype="<f4", count=1)[0])
    halves = np.frombuffer(data, dtype="<f2", offset=HEAD_BYTES, count=blocks)
    return torch.from_numpy(halves.astype(np.float32)).mul_(unit)
