"""sigma8: 256 buckets over a range of standard deviations, decoded to each bucket's mean.

  sigma = |x|_2 / sqrt(n - 1) ;  s = range * sigma / 256 ;  q = clamp(round(x / s) + 128, 0, 255)
  codebook[k] = mean of all x with q = k, or 0

in chunks of 65536 elements. `range` is the whole width: 6 clips at -3.00 and +2.98 sigma. Clipped
values are kept on average, because the outer buckets decode to the mean of their values: the sum of
a chunk is kept to float32's precision for any values. The error of a Gaussian is 0.016 sigma with a
range of 6 (within it 0.0068), and 0.0135 with 12.

`sigma8:12` sets the range, `sigma8:6:centred` measures from the mean of a chunk.

Layout of a packet, little endian:

  offset              size             field
  0                   1024*ceil(n/C)   codebooks, 256 float32 each, C = 65536
  1024*ceil(n/C)      n                codes, uint8

A chunk with a NaN or an infinity decodes to NaN. Encoding a decoded vector again changes values
slightly, because the buckets differ.

The quantiser of INTELLECT-1 (Jaghouar et al. 2024, section 2.4, https://arxiv.org/abs/2412.01152),
which does not centre. Differs: half is rounded to even, and chunks have a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.quantized.packing import Bytes, Floats, Indices
from atoll.codec.spec import Arguments
from atoll.errors import ConfigError

CHUNK = 65_536
"""Elements per codebook, which adds 1.6 % to their bytes."""
RANGES = (6, 12)
_BUCKETS = 256
_BOOK_BYTES = 4 * _BUCKETS
_PIECE = 16_384
"""Elements per partial norm: small enough to avoid the thread pool, so results are reproducible."""


class Sigma8(Stateless):
    """See the module's docstring.

    Raises:
        ConfigError: `width` (standard deviations from the first bucket to the last) is not 6 or 12.
    """

    def __init__(self, width: int = RANGES[0], *, centred: bool = False) -> None:
        if width not in RANGES:
            raise ConfigError(
                "unknown range of codec sigma8",
                given=width, expected=" or ".join(map(str, RANGES)) + " standard deviations",
                remedy="sigma8:6",
            )  # fmt: skip
        self.width, self.centred = width, centred
        self.block = CHUNK
        self.spec = f"sigma8:{width}:centred" if centred else f"sigma8:{width}"

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `sigma8:width` or `sigma8:width:centred`."""
        arguments.at_most(2)
        if arguments.values[1:] not in ((), ("centred",)):
            raise arguments.wrong()
        return cls(arguments.whole(RANGES[0]), centred=len(arguments.values) == 2)

    @property
    def grain(self) -> int:
        """Cuts must be at multiples of this many elements, except at the end."""
        return CHUNK

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """The chunks' books, then one byte for each number."""
        return ((CHUNK, _BOOK_BYTES), (1, 1))

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of elements `start` to `stop`; its bytes are copied."""
        edge = _BOOK_BYTES * _chunks(check_packet(packet, self))
        first, last = start // CHUNK, _chunks(stop) if stop > start else 0
        data = memoryview(packet.data)
        books = data[_BOOK_BYTES * first : _BOOK_BYTES * last]
        return Packet(
            b"".join([books, data[edge + start : edge + stop]]), self.spec, (stop - start,)
        )

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return _BOOK_BYTES * _chunks(elements) + elements

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        elements = x.numel()
        data = np.empty(self.nbytes(elements), dtype=np.uint8)
        edge = _BOOK_BYTES * _chunks(elements)
        books, codes = data[:edge].view("<f4").reshape(-1, _BUCKETS), data[edge:]
        scratch = np.empty(min(CHUNK, elements), dtype=np.float32)
        for number, start in enumerate(range(0, elements, CHUNK)):
            part = x[start : start + CHUNK]
            found = codes[start : start + CHUNK]
            self._quantise(part, codes=found, scratch=scratch[: len(found)])
            books[number] = _means(part.numpy(), found)
        return Packet(data.data, self.spec, (elements,))

    def _quantise(self, x: Tensor, *, codes: Bytes, scratch: Floats) -> None:
        if self.centred:
            x = torch.sub(x, float(x.mean(dtype=torch.float64)), out=torch.from_numpy(scratch))
        step = self.width * _deviation(x) / _BUCKETS
        if not math.isfinite(step) or step < np.finfo(np.float32).tiny:
            codes.fill(_BUCKETS // 2)
            return
        np.divide(x.numpy(), np.float32(step), out=scratch)
        np.rint(scratch, out=scratch)
        scratch += np.float32(_BUCKETS // 2)
        np.clip(scratch, 0, _BUCKETS - 1, out=scratch)
        np.copyto(codes, scratch, casting="unsafe")

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        target = result.numpy()
        for start, book, codes in _opened(packet, elements):
            np.take(book, codes, out=target[start : start + len(codes)], mode="clip")
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`; the weight goes into the codebooks."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        scratch = torch.empty(min(_PIECE, elements))
        for start, book, codes in _opened(packet, elements):
            levels = torch.from_numpy(book)
            if weight != 1.0:
                levels = levels * weight
            part = scratch[: len(codes)]
            np.take(levels.numpy(), codes, out=part.numpy(), mode="clip")
            result[start : start + len(codes)].add_(part)


def _chunks(elements: int) -> int:
    return -(-elements // CHUNK)


def _deviation(x: Tensor) -> float:
    """Return the root mean square with divisor n - 1; for a single element its magnitude."""
    squares = sum(float(p.double().square().sum()) for p in torch.split(x, _PIECE))
    return math.sqrt(squares / max(len(x) - 1, 1))


def _means(x: Floats, codes: Bytes) -> Floats:
    """Return the mean of the elements with each code, shape (256,); NaN if one is non-finite."""
    indices = codes.astype(np.intp)
    sums = np.bincount(indices, weights=x, minlength=_BUCKETS)
    if not np.isfinite(sums).all():
        return np.full(_BUCKETS, np.nan, dtype=np.float32)
    counts = np.bincount(indices, minlength=_BUCKETS)
    means: Floats = (sums / np.maximum(counts, 1)).astype(np.float32)
    return means


def _opened(packet: Packet, elements: int) -> Iterator[tuple[int, Floats, Indices]]:
    """Yield pieces of a packet: the first element, the codebook and the codes as indices."""
    edge = _BOOK_BYTES * _chunks(elements)
    data = np.frombuffer(packet.data, dtype=np.uint8)
    books = np.frombuffer(packet.data, dtype="<f4", count=edge // 4).astype(np.float32)
    for start in range(0, elements, _PIECE):
        codes = data[edge + start : edge + min(start + _PIECE, elements)]
        first = start // CHUNK * _BUCKETS
        yield start, books[first : first + _BUCKETS], codes.astype(np.intp)
