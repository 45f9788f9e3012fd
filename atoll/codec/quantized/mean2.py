"""mean2: 2 bits per value: its sign, and whether it is above the mean magnitude of that sign.

  t+ = mean of all x >= 0 ;  t- = mean of all x < 0
  code = 0: x < t-, 1: t- <= x < 0, 2: 0 <= x <= t+, 3: x > t+
  codebook[k] = mean of all x with code k, or 0

in chunks of 4096 elements. The sum of a chunk is kept to float32's precision. Made for values that
`topk` has chosen, which have no small ones: of the largest 64th of Gaussian (Laplacian) values its
error is 0.07 (0.13), where `int2` and the quantiser below have 0.11 (0.19).

Layout of a packet, little endian, n elements, C = 4096:

  offset           size             field
  0                16*ceil(n/C)     codebooks, 4 float32 each
  16*ceil(n/C)     ceil(n/4)        codes, see `packing`

A chunk with a NaN or an infinity decodes to NaN.

After the 2-bit quantiser of SparseLoCo (https://arxiv.org/abs/2508.15706), which decodes to the
means of buckets too. Differs: that one has edges at multiples of the standard deviation around the
mean, where the bucket around zero stays nearly empty after `topk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.quantized.packing import (
    Bytes,
    Floats,
    look_up_table,
    pack,
    packed_bytes,
    unpack,
)
from atoll.codec.spec import Arguments

CHUNK = 4096
"""Elements per codebook, which adds 1.6 % to their bytes."""
_CODES = 4
_BITS = 2
_BOOK_BYTES = 4 * _CODES
_BELOW, _ABOVE = 1, 2
"""Codes of the values close to zero."""


class Mean2(Stateless):
    """See the module's docstring."""

    spec = "mean2"

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `mean2`."""
        arguments.at_most(0)
        return cls()

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return _BOOK_BYTES * _chunks(elements) + packed_bytes(elements, _BITS)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        elements = x.numel()
        data = np.empty(self.nbytes(elements), dtype=np.uint8)
        edge = _BOOK_BYTES * _chunks(elements)
        books = data[:edge].view("<f4").reshape(-1, _CODES)
        codes = np.zeros(-(-elements // 8) * 8, dtype=np.uint8)
        for number, start in enumerate(range(0, elements, CHUNK)):
            part = x[start : start + CHUNK].numpy()
            books[number] = _quantise(part, codes=codes[start : start + len(part)])
        pack(codes, bits=_BITS, out=data[edge:])
        return Packet(data.data, self.spec, (elements,))

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        for start, values in _opened(packet, elements, weight=1.0):
            result[start : start + len(values)] = torch.from_numpy(values)
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`; the weight goes into the codebooks."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        for start, values in _opened(packet, elements, weight=weight):
            result[start : start + len(values)].add_(torch.from_numpy(values))


def _chunks(elements: int) -> int:
    return -(-elements // CHUNK)


def _quantise(x: Floats, *, codes: Bytes) -> Floats:
    """Write the codes of a chunk; return its codebook, shape (4,); NaN if a value is non-finite."""
    negative = x < 0
    sides = np.bincount(negative, weights=x, minlength=2)
    if not np.isfinite(sides).all():
        codes.fill(_ABOVE)
        return np.full(_CODES, np.nan, dtype=np.float32)
    low, high = sides[1] / max(1, np.count_nonzero(negative)), sides[0] / max(1, (~negative).sum())
    np.copyto(codes, np.where(negative, _BELOW, _ABOVE), casting="unsafe")
    codes[x > np.float32(high)] = _CODES - 1
    codes[x < np.float32(low)] = 0
    sums = np.bincount(codes, weights=x, minlength=_CODES)
    book: Floats = (sums / np.maximum(np.bincount(codes, minlength=_CODES), 1)).astype(np.float32)
    return book


def _opened(packet: Packet, elements: int, *, weight: float) -> Iterator[tuple[int, Floats]]:
    """Yield the first element and the values, times `weight`, of every chunk."""
    edge = _BOOK_BYTES * _chunks(elements)
    data = np.frombuffer(packet.data, dtype=np.uint8)
    books = np.frombuffer(packet.data, dtype="<f4", count=edge // 4).astype(np.float32)
    scratch = np.empty(CHUNK, dtype=np.float32)
    for start in range(0, elements, CHUNK):
        number, stop = start // CHUNK * _CODES, min(start + CHUNK, elements)
        packed = data[edge + start // 4 : edge + packed_bytes(stop, _BITS)]
        with np.errstate(over="ignore", invalid="ignore"):  # callers check the sum
            levels = books[number : number + _CODES] * np.float32(weight)
        unpack(packed, table=look_up_table(levels, bits=_BITS), out=scratch[: 4 * len(packed)])
        yield start, scratch[: stop - start]
