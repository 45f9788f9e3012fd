"""Base class of codecs with one scale per block of elements and a few bits per element.

Layout of a packet of n > 0 elements with blocks of B, little endian, no padding:

  offset                     size               field
  0                          4 + 2*ceil(n/B)    unit and scales, see `scales`
  4 + 2*ceil(n/B)            ceil(n*bits/8)     codes, see `packing`

decode: `x = level[code] * scale`; one rounding at most, so all machines decode the same bits.

 * A block with a NaN or an infinity decodes to NaN.
 * A block with a scale below 2e-12 of the packet's largest decodes to zeros.
 * The last block may be short.

Two passes over memory: the first finds the scales, the second quantises with the scales as the
decoder will read them, rounded. A strip of 125 KiB stays in the core's cache meanwhile, and scratch
memory is allocated once per call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.quantized.cast import STRIP
from atoll.codec.quantized.packing import (
    Bytes,
    Floats,
    look_up_table,
    pack,
    packed_bytes,
    unpack,
    unpacked_codes,
)
from atoll.codec.quantized.scales import (
    HEAD_BYTES,
    SCALE_BYTES,
    read_scales,
    scales_bytes,
    write_scales,
)
from atoll.codec.spec import Arguments
from atoll.errors import ConfigError

DEFAULT_BLOCK = 256
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 8192
"""Sums of up to 8192 equal 11-bit values are exact in float32, so re-encoding changes nothing."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive blocks processed at once; all have `width` elements."""

    first: int
    """Index of the first block."""
    rows: int
    width: int
    start: int
    """Index of the first element."""

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + self.rows * self.width


def strips(elements: int, block: int) -> Iterator[Strip]:
    """Yield the strips of a vector; a short last block is a separate strip."""
    full, rest = divmod(elements, block)
    rows = STRIP // block
    for first in range(0, full, rows):
        yield Strip(first, min(rows, full - first), block, first * block)
    if rest:
        yield Strip(full, 1, rest, full * block)


class Blocks(Stateless, ABC):
    """A codec of blocks; subclasses define the scale and the levels.

    Raises:
        ConfigError: `block` (elements per scale) is not a multiple of 8 between 8 and 8192.
    """

    name: str
    bits: int
    """Of one code: 1, 2, 4, 6 or 8."""
    levels: Floats
    """Value of every code in units of the scale; shape (2**bits,)."""
    upwards = False
    """Whether a scale is never rounded down."""

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        if not SMALLEST_BLOCK <= block <= LARGEST_BLOCK or block % 8:
            raise ConfigError(
                f"the block of codec {self.name} is out of range",
                given=block,
                expected=f"a multiple of 8, {SMALLEST_BLOCK} to {LARGEST_BLOCK} elements",
                remedy=f"{self.name}:{DEFAULT_BLOCK}",
            )
        self.block = block
        self.spec = f"{self.name}:{block}"
        self._table = look_up_table(self.levels, bits=self.bits)
        self._highest = float(np.finfo(np.float32).max) / float(np.nanmax(np.abs(self.levels)))

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `name:block`."""
        arguments.at_most(1)
        return cls(arguments.whole(DEFAULT_BLOCK))

    @abstractmethod
    def measure(self, x: Tensor, *, scratch: Tensor) -> Tensor:
        """Return the scale of each row's block, shape (rows,); non-finite where x is.

        `x` has shape (rows, width) and is read-only; `scratch` is memory of that shape.
        """

    @abstractmethod
    def quantise(
        self,
        x: Tensor,
        divisors: Tensor,
        *,
        codes: Bytes,
        scratch: Tensor,
        noise: np.random.Generator | None,
    ) -> None:
        """Write the code of every element of `x`, shape (rows, width), read-only and finite.

        `divisors` are the scales, shape (rows, 1), infinite for blocks without one; `codes` has
        shape (rows * width,).
        """

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        blocks = -(-elements // self.block)
        return scales_bytes(blocks) + packed_bytes(elements, self.bits)

    @property
    def grain(self) -> int:
        """Cuts must be at multiples of this many elements, except at the end."""
        return self.block

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of elements `start` to `stop`; its bytes are copied."""
        edge = scales_bytes(-(-check_packet(packet, self) // self.block))
        if start >= stop:
            return Packet(b"", self.spec, (0,))
        data, first, last = memoryview(packet.data), start // self.block, -(-stop // self.block)
        scales = data[HEAD_BYTES + SCALE_BYTES * first : HEAD_BYTES + SCALE_BYTES * last]
        begin, end = edge + start * self.bits // 8, edge + packed_bytes(stop, self.bits)
        part = b"".join([data[:HEAD_BYTES], scales, data[begin:end]])
        return Packet(part, self.spec, (stop - start,))

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        data = np.empty(self.nbytes(x.numel()), dtype=np.uint8)
        if x.numel():
            self._encode(x, data, key=key)
        return Packet(data.data, self.spec, (x.numel(),))

    def _encode(self, x: Tensor, data: Bytes, *, key: str) -> None:
        elements, blocks = x.numel(), -(-x.numel() // self.block)
        scratch = torch.empty(STRIP)
        found = torch.empty(blocks)
        for strip in strips(elements, self.block):
            rows = x[strip.start : strip.end].view(strip.rows, strip.width)
            part = scratch[: rows.numel()].view(rows.shape)
            found[strip.first : strip.first + strip.rows] = self.measure(rows, scratch=part)
        finite = math.isfinite(float(found.sum(dtype=torch.float64)))
        if not finite:
            found[~torch.isfinite(found)] = torch.nan
        # Slightly below the maximum, so that rounding the scale to 11 bits does not exceed it.
        found.clamp_(max=self._highest * (1 - 2**-10))
        edge = scales_bytes(blocks)
        divisors = write_scales(found, out=data[:edge].data, upwards=self.upwards)
        divisors.masked_fill_((divisors == 0.0) | divisors.isnan(), torch.inf)
        codes, target = np.zeros(STRIP + 8, dtype=np.uint8), data[edge:]
        noise = self.noise(x, key=key)
        for strip in strips(elements, self.block):
            rows = x[strip.start : strip.end].view(strip.rows, strip.width)
            if not finite:
                rows = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            part = scratch[: rows.numel()].view(rows.shape)
            over = divisors[strip.first : strip.first + strip.rows].view(-1, 1)
            size = rows.numel()
            self.quantise(rows, over, codes=codes[:size], scratch=part, noise=noise)
            codes[size : size + 8] = 0
            first = strip.start * self.bits // 8
            packed = target[first : first + packed_bytes(size, self.bits)]
            pack(codes[: -(-size // 8) * 8], bits=self.bits, out=packed)

    def noise(self, x: Tensor, *, key: str) -> np.random.Generator | None:
        """Return the generator of a vector's random numbers, for stochastic codecs."""
        return None

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        if elements:
            for strip, values, scales in self._decoded(packet, elements):
                part = result[strip.start : strip.end].view(strip.rows, strip.width)
                torch.mul(values.view(part.shape), scales, out=part)
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`; the weight goes into the scales."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        if elements:
            for strip, values, scales in self._decoded(packet, elements, weight=weight):
                values.view(strip.rows, strip.width).mul_(scales)
                # Multiply and add separately: fused, the rounding would depend on the machine.
                result[strip.start : strip.end].add_(values)

    def _decoded(
        self, packet: Packet, elements: int, *, weight: float = 1.0
    ) -> Iterator[tuple[Strip, Tensor, Tensor]]:
        """Yield strips with their levels, shape (n,), and their scales, shape (rows, 1)."""
        blocks = -(-elements // self.block)
        scales = read_scales(packet.data, blocks)
        if weight != 1.0:
            scales.mul_(weight)
        data = np.frombuffer(packet.data, dtype=np.uint8, offset=scales_bytes(blocks))
        scratch = np.empty(STRIP + 8, dtype=np.float32)
        for strip in strips(elements, self.block):
            size, first = strip.end - strip.start, strip.start * self.bits // 8
            count = packed_bytes(size, self.bits)
            codes = scratch[: unpacked_codes(count, self.bits)]
            unpack(data[first : first + count], table=self._table, out=codes)
            levels = torch.from_numpy(scratch[:size])
            yield strip, levels, scales[strip.first : strip.first + strip.rows, None]
