"""dct: of every 4096 elements the K largest coefficients of their cosine transform.

A vector is cut into chunks of 4096 consecutive elements, each seen as 64 by 64; the last one is
padded with zeros. Smooth trends along a chunk become few coefficients, which top-k of the elements
would miss. Members all-gather the packets, as with `topk`.

Layout of a packet: for every chunk the positions of its coefficients (2*K bytes, uint16 ascending,
or a bitmap of 512 bytes if that is smaller), then the packet of all coefficients by the second
codec.

The inverse gives the same bits on every machine, which a floating-point sum of products does not,
and members that add up decoded vectors need equal bits. So it uses integers: cosines in units of
2**-20, coefficients in units of 2**-22 of a power of two above their chunk's largest. All sums stay
below 2**53, where float64 is exact in every order. The rounding costs less than 1e-5 of the largest
value.

Transform and selection are those of DeMo (Peng, Quesnelle and Kingma 2024, section 3,
https://arxiv.org/abs/2411.19870). Differs from it: chunks are cut from the flat vector, not from
each tensor, and positions take 2 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, check_packet, output
from atoll.codec.quantized.packing import Bytes, Indices
from atoll.codec.sparse.cosine import cosines
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.selecting import Selecting
from atoll.errors import ConfigError, WireError

SIDE = 64
CHUNK = SIDE * SIDE
_BASIS_BITS, _VALUE_BITS = 20, 22
_AT_ONCE = 7
"""Chunks transformed together: below 32768 elements torch never uses its thread pool."""
_BITMAP_BYTES = CHUNK // 8
_MAGNITUDE = np.int32(0x7FFF_FFFF)


class Dct(Selecting):
    """The largest coefficients.

    Raises:
        ConfigError: `kept` (coefficients per chunk) is not 1 to 4096.
    """

    needs_allgather = True

    def __init__(self, kept: int, values: Codec) -> None:
        if not 1 <= kept <= CHUNK:
            raise ConfigError(
                "the number of coefficients of codec dct is out of range",
                given=kept, expected=f"1 to {CHUNK} of {CHUNK}", remedy="dct:32",
            )  # fmt: skip
        super().__init__(f"dct:{kept}", values)
        self.kept = kept
        self._cosines = cosines(SIDE).float()
        self._whole = torch.round(cosines(SIDE) * 2**_BASIS_BITS)
        self._per_chunk = min(2 * kept, _BITMAP_BYTES)

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `dct:kept|values`."""
        arguments.at_most(1)
        if not arguments.values:
            raise arguments.wrong()
        return cls(arguments.whole(0), *inner)

    def count(self, elements: int) -> int:
        """Return the number of coefficients sent."""
        return self.kept * _chunks(elements)

    def where_bytes(self, elements: int) -> int:
        """Return the bytes of their positions."""
        return self._per_chunk * _chunks(elements)

    def choose(self, x: Tensor, *, out: Bytes) -> Tensor:
        """Return the largest coefficients, chunk by chunk in the order of their positions."""
        chosen = torch.empty(_chunks(x.numel()), self.kept)
        rows = out.reshape(len(chosen), self._per_chunk)
        for first in range(0, len(chosen), _AT_ONCE):
            squares = _filled(x, first).view(-1, SIDE, SIDE)
            z = (self._cosines @ squares @ self._cosines.T).reshape(-1, CHUNK)
            magnitudes = z.numpy().view(np.int32) & _MAGNITUDE
            places = np.argpartition(magnitudes, CHUNK - self.kept, axis=1)[:, -self.kept :]
            places.sort(axis=1)
            end = first + len(z)
            chosen[first:end] = torch.from_numpy(np.take_along_axis(z.numpy(), places, axis=1))
            self._write(places, rows[first:end])
        return chosen.view(-1)

    def _write(self, places: Indices, rows: Bytes) -> None:
        if self._per_chunk == 2 * self.kept:
            np.copyto(rows, places.astype("<u2").view(np.uint8))
            return
        marks = np.zeros((len(places), CHUNK), dtype=np.bool_)
        np.put_along_axis(marks, places, True, axis=1)
        np.copyto(rows, np.packbits(marks, axis=1, bitorder="little"))

    def where(self, data: Bytes, elements: int) -> Indices:
        """Return the positions, shape (chunks, K)."""
        rows = data.reshape(_chunks(elements), self._per_chunk)
        if self._per_chunk == 2 * self.kept:
            places = np.frombuffer(rows.tobytes(), dtype="<u2").reshape(len(rows), self.kept)
            found = places.astype(np.int64)
            good = bool((np.diff(found, axis=1) > 0).all()) and int(found.max(initial=0)) < CHUNK
        else:
            marks = np.unpackbits(rows, axis=1, bitorder="little")
            good = bool((marks.sum(axis=1) == self.kept).all())
            found = np.zeros((len(rows), self.kept), dtype=np.int64)
            if good:
                found[:] = np.nonzero(marks)[1].reshape(found.shape)
        if not good:
            raise WireError(
                "the positions in a packet of codec dct are damaged",
                given=f"{len(rows)} chunks", expected=f"{self.kept} ascending ones in each",
            )  # fmt: skip
        return found

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        result = output(out, check_packet(packet, self)).zero_()
        self.decode_add(packet, out=result)
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        if not elements:
            return
        places, values = self._open(packet, elements)
        values = values.view(len(places), self.kept)
        for first in range(0, len(places), _AT_ONCE):
            end = min(first + _AT_ONCE, len(places))
            z = torch.zeros(end - first, CHUNK)
            z.scatter_(1, torch.from_numpy(places[first:end]), values[first:end])
            part = self.inverse(z).view(-1)
            target = result[first * CHUNK : end * CHUNK]
            if weight != 1.0:
                part.mul_(weight)
            target.add_(part[: len(target)])

    def inverse(self, z: Tensor) -> Tensor:
        """Return the inverse transform of coefficients, shape (chunks, 4096), bitwise reproducible.

        A chunk with a non-finite value becomes NaN.
        """
        largest = z.abs().amax(dim=1, keepdim=True).double()
        broken = ~torch.isfinite(largest)
        _, exponent = torch.frexp(largest.masked_fill(broken, 0.0))
        unit = torch.ldexp(torch.ones_like(largest), exponent - _VALUE_BITS)
        whole = (z.double() / unit).round_().masked_fill_(broken, 0.0).view(-1, SIDE, SIDE)
        half = (self._whole.T @ whole).mul_(2.0**-_BASIS_BITS).round_()
        full = (half @ self._whole).view(-1, CHUNK).mul_(unit * 2.0**-_BASIS_BITS)
        return full.masked_fill_(broken, torch.nan).float()


def _chunks(elements: int) -> int:
    return -(-elements // CHUNK)


def _filled(x: Tensor, first: int) -> Tensor:
    """Return a few chunks from the given one on, the last one padded with zeros."""
    part = x[first * CHUNK : (first + _AT_ONCE) * CHUNK]
    missing = -part.numel() % CHUNK
    return torch.nn.functional.pad(part, (0, missing)).view(-1, CHUNK)
