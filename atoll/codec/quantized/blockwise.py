"""int8 with one scale per block of elements: the largest magnitude of a block becomes 127.

Layout of a packet of n elements with blocks of B, little endian, no padding:

  offset                size           field
  0                     4*ceil(n/B)    scales, float32
  4*ceil(n/B)           n              values, int8, -127..127

decode: `x = value * scale`; one rounding, so all machines decode the same bits. The error of an
element is at most half a scale, 0.4 % of the largest magnitude of its block.

 * Scales are float32: pseudo-gradients of 1e-6 would need a scale of 8e-9, which float16 cannot
   represent; they take 1.6 % of a packet at B = 256.
 * A block with a NaN or an infinity gets the scale NaN, so all of it decodes to NaN.
 * A block with all magnitudes below 127 * 2**-126 (1.5e-36) decodes to zeros: its scale would be
   subnormal and lose its precision.
 * The last block may be short.

Blockwise absmax quantising: Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
section 2.1 (https://arxiv.org/abs/2110.02861). Differs from the paper: values are linear, not
dynamic-tree, so that decoding needs no table; blocks are 256 by default, not 2048, because here
the error matters more than 1.4 % of the bytes.

Whole-vector operations took 130 ms to encode 40 MB, of which 105 ms were 51000 page faults for
temporaries that glibc frees after each operation. Here all passes run over a strip of 125 KiB in
the core's cache, with scratch memory allocated once per call: 10-15 ms and 436 faults
(`python -m bench.codecs`, one thread).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.quantized.cast import STRIP
from atoll.codec.spec import Arguments
from atoll.errors import ConfigError

DEFAULT_BLOCK = 256
"""Relative error 0.70 % of a Gaussian vector; 1024 gives 0.79 % and saves 1.2 % of the bytes."""

LARGEST = 127.0
_TINIEST_SCALE = 2.0**-126
_LARGEST_SCALE = float(np.nextafter(np.finfo(np.float32).max / np.float32(LARGEST), np.float32(0)))
"""127 times this scale is still finite."""


class BlockwiseInt8(Stateless):
    """int8 values with one float32 scale per block.

    Raises:
        ConfigError: `block` (elements per scale) is not 8 to 16384.
    """

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        if not 8 <= block <= 16_384:
            raise ConfigError(
                "the block of codec int8 is out of range",
                given=block,
                expected="8 to 16384 elements",
                remedy=f"int8:{DEFAULT_BLOCK}",
            )
        self.block = block
        self.spec = f"int8:{block}"
        self._rows = STRIP // block

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `int8:block`."""
        arguments.at_most(1)
        return cls(arguments.whole(DEFAULT_BLOCK))

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return 4 * self._num_blocks(elements) + elements

    @property
    def grain(self) -> int:
        """Cuts must be at multiples of this many elements, except at the end."""
        return self.block

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The blocks' scales, then one byte for each number."""
        return ((self.block, 4), (1, 1))

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of elements `start` to `stop`; its bytes are copied."""
        edge = 4 * self._num_blocks(check_packet(packet, self))
        first, last = start // self.block, self._num_blocks(stop) if stop > start else 0
        data = memoryview(packet.data)
        part = b"".join([data[4 * first : 4 * last], data[edge + start : edge + stop]])
        return Packet(part, self.spec, (stop - start,))

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        elements, blocks = x.numel(), self._num_blocks(x.numel())
        data = np.empty(self.nbytes(elements), dtype=np.uint8)
        if elements:
            whole = torch.from_numpy(data)
            scales = whole[: 4 * blocks].view(torch.float32)
            values = whole[4 * blocks :].view(torch.int8)
            scratch = torch.empty(self._rows * self.block)
            inverse = torch.empty(self._rows, 1)
            for first, rows, width in self._strips(elements):
                start, size = first * self.block, rows * width
                _encode_rows(
                    x[start : start + size].view(rows, width),
                    values=values[start : start + size].view(rows, width),
                    scales=scales[first : first + rows].view(rows, 1),
                    scratch=scratch[:size].view(rows, width),
                    inverse=inverse[:rows],
                )
        return Packet(data.data, self.spec, (elements,))

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        values, scales = self._open(packet, elements)
        target = result.numpy()
        for first, rows, width in self._strips(elements):
            start, end = first * self.block, first * self.block + rows * width
            # Copy directly from the received buffer, which may be unaligned, into the target's
            # strip.
            np.copyto(target[start:end], values[start:end])
            result[start:end].view(rows, width).mul_(scales[first : first + rows])
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`; the weight goes into the scales."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        values, scales = self._open(packet, elements)
        if weight != 1.0:
            scales.mul_(weight)
        scratch = torch.empty(self._rows * self.block)
        for first, rows, width in self._strips(elements):
            start, size = first * self.block, rows * width
            part = scratch[:size]
            np.copyto(part.numpy(), values[start : start + size])
            part.view(rows, width).mul_(scales[first : first + rows])
            # Multiply and add separately: fused, the rounding would depend on the machine.
            result[start : start + size].add_(part)

    def _num_blocks(self, elements: int) -> int:
        return -(-elements // self.block)

    def _strips(self, elements: int) -> list[tuple[int, int, int]]:
        """Return (first block, number of blocks, elements per block) of every strip."""
        full, rest = divmod(elements, self.block)
        strips = [
            (first, min(self._rows, full - first), self.block)
            for first in range(0, full, self._rows)
        ]
        return [*strips, (full, 1, rest)] if rest else strips

    def _open(self, packet: Packet, elements: int) -> tuple[np.ndarray, Tensor]:
        """Return the values (n,) as a view and the scales (blocks, 1) as a copy."""
        blocks = self._num_blocks(elements)
        scales = np.frombuffer(packet.data, dtype="<f4", count=blocks).astype(np.float32)
        values = np.frombuffer(packet.data, dtype=np.int8, offset=4 * blocks) if blocks else scales
        return values, torch.from_numpy(scales).view(blocks, 1)


def _encode_rows(
    x: Tensor, *, values: Tensor, scales: Tensor, scratch: Tensor, inverse: Tensor
) -> None:
    """Quantise the blocks in the rows of `x`, shape (rows, width), into `values` and `scales`.

    `scratch`, shape (rows, width), and `inverse`, shape (rows, 1), are float32 memory.
    """
    torch.abs(x, out=scratch)
    # amax propagates NaN; aminmax would avoid abs but is not vectorised: 20 times slower.
    torch.amax(scratch, dim=1, keepdim=True, out=scales)
    finite = math.isfinite(float(scales.sum(dtype=torch.float64)))
    scales.div_(LARGEST)
    if not finite:
        scales[~torch.isfinite(scales)] = torch.nan
    scales.clamp_(max=_LARGEST_SCALE)
    torch.threshold(scales, _TINIEST_SCALE, 0.0, out=scales)
    torch.reciprocal(scales, out=inverse)
    # 0 * inf would be NaN: the inverse of a zero scale is zero.
    inverse.masked_fill_(scales == 0.0, 0.0)
    torch.mul(x, inverse, out=scratch)
    if not finite:
        scratch.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    # torch.round wakes the thread pool for vectors over 2048 elements: 3 times slower.
    np.rint(scratch.numpy(), out=scratch.numpy())
    values.copy_(scratch)
