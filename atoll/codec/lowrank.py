"""lowrank: send every matrix as the product of two low-rank ones, found as in PowerSGD.

  P = orthonormal(M Q) ;  Q' = M^T P ;  decode: P Q'^T

M is a tensor as a matrix of its first dimension by all others, R the rank. Q' of a round is Q of
the next (warm start: over the rounds Q converges to the dominant directions). If R is at least the
rank of M the product is exact. One-dimensional tensors, and those that would not get smaller, are
sent uncompressed. The approximation error is lost unless the codec is used in `feedback(...)`.

A packet is self-describing; little endian:

  offset     size     field
  0          4        number of tensors, uint32
  4          8*t      rows and columns of each, uint32; 1 row: sent uncompressed
  4 + 8*t    ...      float32, tensor by tensor: P (rows, R) and Q' (columns, R), or the values

Before `set_shapes`, and for vectors of another length, the vector is sent as one uncompressed
tensor. A mean of such products does not have the same rank, so members all-gather the packets.
Decoding adds up R outer products one after the other, multiplying and adding separately, so that it
gives the same bits everywhere. A round's Q is kept once the round is committed.

Vogels, Karimireddy and Jaggi 2019, Algorithm 1 (https://arxiv.org/abs/1905.13727). Differs: there P
and Q are averaged over the members in two exchanges (the strategy `powersgd` does that); here each
member sends its own, in one. Columns of Q that have vanished are redrawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_vector, output
from atoll.codec.seeds import mixed, random_words
from atoll.codec.spec import Arguments
from atoll.errors import ConfigError, WireError

LARGEST_RANK = 256
_MOST_TENSORS = 1 << 20  # a packet with more is damaged
_ROWS_AT_ONCE = 32_000
"""Elements of a matrix decoded at once, at least one row."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor in the vector."""

    rows: int
    columns: int
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def numbers(self, rank: int) -> int:
        """Return the number of values sent."""
        return self.size if self.rows == 1 else rank * (self.rows + self.columns)


class LowRank(Stateless):
    """See the module's docstring. Not thread-safe.

    Raises:
        ConfigError: `rank` is not 1 to 256.
    """

    needs_allgather = True

    def __init__(self, rank: int) -> None:
        if not 1 <= rank <= LARGEST_RANK:
            raise ConfigError(
                "the rank of codec lowrank is out of range",
                given=rank, expected=f"1 to {LARGEST_RANK}", remedy="lowrank:4",
            )  # fmt: skip
        self.rank, self.spec = rank, f"lowrank:{rank}"
        self._parts: list[Part] = []
        self._elements = 0
        self._starts: dict[str, Tensor] = {}
        """Q of every matrix, by `key/number`."""
        self._provisional: dict[str, Tensor] = {}

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `lowrank:rank`."""
        arguments.at_most(1)
        if not arguments.values:
            raise arguments.wrong()
        return cls(arguments.whole(0))

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Set the matrices in a vector."""
        self._parts, start = [], 0
        for shape in shapes:
            size = math.prod(shape)
            rows = shape[0] if len(shape) > 1 and size else 1
            if self.rank * (rows + size // rows) >= size:
                rows = 1
            self._parts.append(Part(rows, size // rows, start))
            start += size
        self._elements = start

    def _of(self, elements: int) -> list[Part]:
        known = elements == self._elements and self._parts
        return self._parts if known else [Part(1, elements, 0)]

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet for the current shapes."""
        parts = self._of(elements)
        return 4 + 8 * len(parts) + 4 * sum(part.numbers(self.rank) for part in parts)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        parts, data = self._of(x.numel()), np.empty(self.nbytes(x.numel()), dtype=np.uint8)
        head = np.array([[part.rows, part.columns] for part in parts], dtype="<u4")
        data[:4] = np.array([len(parts)], dtype="<u4").view(np.uint8)
        data[4 : 4 + head.nbytes] = head.reshape(-1).view(np.uint8)
        numbers, at = data[4 + head.nbytes :].view("<f4"), 0
        for number, part in enumerate(parts):
            values = x[part.start : part.start + part.size]
            if part.rows > 1:
                values = self._factors(values.view(part.rows, -1), name=f"{key}/{number}")
            numbers[at : at + values.numel()] = values.numpy()
            at += values.numel()
        return Packet(data.data, self.spec, (x.numel(),))

    def _factors(self, matrix: Tensor, *, name: str) -> Tensor:
        """Return P and Q' of a matrix, concatenated; Q' is kept for the next round."""
        rows, columns = matrix.shape
        if not math.isfinite(float(matrix.sum(dtype=torch.float64))):
            return torch.full((self.rank * (rows + columns),), torch.nan)
        # Scale by a power of two: squares of 1e-30 or 1e30 do not fit in float32, nor does 2^128.
        scale = 2.0 ** min(127, math.frexp(float(matrix.abs().max()))[1])
        scaled = matrix / scale if scale else matrix
        left, _ = torch.linalg.qr(scaled @ self._start(name, columns))
        right = scaled.T @ left
        self._provisional[name] = right
        missing = self.rank - left.shape[1]
        if missing > 0:
            left = torch.nn.functional.pad(left, (0, missing))
            right = torch.nn.functional.pad(right, (0, missing))
        return torch.cat([left.reshape(-1), (right * scale).reshape(-1)])

    def _start(self, name: str, columns: int) -> Tensor:
        """Return the initial Q, shape (columns, rank) or narrower; zero columns are redrawn."""
        drawn = _drawn(mixed("lowrank", name), columns, self.rank)
        known = self._starts.get(name)
        if known is None or known.shape[0] != columns:
            return drawn
        lengths = known.norm(dim=0)
        alive = lengths > 1e-4 * lengths.max()
        directions = known / torch.where(alive, lengths, 1.0)
        drawn[:, : known.shape[1]] = torch.where(alive, directions, drawn[:, : known.shape[1]])
        # Two parallel columns would find the same direction twice.
        found: Tensor = torch.linalg.qr(drawn)[0]
        return found

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        parts, numbers = self._open(packet)
        result = output(out, packet.num_elements)
        for start, values in self._decoded(parts, numbers):
            result[start : start + len(values)] = values
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        parts, numbers = self._open(packet)
        result = output(out, packet.num_elements)
        for start, values in self._decoded(parts, numbers):
            if weight != 1.0:
                values = values * weight
            result[start : start + len(values)].add_(values)

    def _open(self, packet: Packet) -> tuple[list[Part], Tensor]:
        """Return a packet's layout and values; raises WireError if it is inconsistent."""
        if packet.codec != self.spec:
            raise WireError(
                "a packet was given to the wrong codec",
                given=repr(packet.codec), expected=repr(self.spec),
                remedy="decode it with make_codec(packet.codec)",
            )  # fmt: skip
        data = memoryview(packet.data)
        count = int.from_bytes(data[:4], "little") if len(data) >= 4 else _MOST_TENSORS
        parts: list[Part] = []
        if count < _MOST_TENSORS and len(data) >= 4 + 8 * count:
            sides = np.frombuffer(data, dtype="<u4", offset=4, count=2 * count).astype(np.int64)
            start = 0
            for rows, columns in sides.reshape(count, 2).tolist():
                parts.append(Part(max(rows, 1), columns, start))
                start += parts[-1].size
        expected = 4 + 8 * len(parts) + 4 * sum(part.numbers(self.rank) for part in parts)
        elements = sum(part.size for part in parts)
        if min(packet.sizes, default=0) < 0 or (elements, expected) != (
            packet.num_elements,
            len(data),
        ):
            raise WireError(
                f"a packet of codec {self.spec} has the wrong length",
                given=f"{len(data)} bytes for sizes {packet.sizes}",
                expected=f"{expected} bytes for the {elements} elements that it names",
            )
        # A small packet can name large matrices: their sides add up to little.
        if self._parts and parts != self._of(elements):
            raise WireError(
                f"a packet of codec {self.spec} has other matrices than this model",
                given=f"{len(parts)} tensors with {elements} elements",
                expected=f"{len(self._parts)} tensors with {self._elements} elements",
            )
        numbers = np.frombuffer(data, dtype="<f4", offset=4 + 8 * len(parts)).astype(np.float32)
        return parts, torch.from_numpy(numbers)

    def _decoded(self, parts: Sequence[Part], numbers: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces of the vector: the first element, and the values."""
        at = 0
        for part in parts:
            factors = numbers[at : at + part.numbers(self.rank)]
            at += len(factors)
            if part.rows == 1:
                yield part.start, factors
                continue
            left = factors[: part.rows * self.rank].view(part.rows, self.rank)
            right = factors[part.rows * self.rank :].view(part.columns, self.rank).T.contiguous()
            step = max(1, _ROWS_AT_ONCE // max(1, part.columns))
            for first in range(0, part.rows, step):
                some = left[first : first + step]
                yield part.start + first * part.columns, _product(some, right)

    def finish(self, *, committed: bool) -> None:
        """Start the next round from these Q if the round was committed."""
        if committed:
            self._starts |= self._provisional
        self._provisional = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return Q of every matrix."""
        return {name: start.clone() for name, start in self._starts.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load Q of every matrix."""
        self._starts = {name: start.clone() for name, start in state.items()}
        self._provisional = {}


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product, flat; adds in the order of the columns, never fused."""
    total = left[:, :1] * right[:1]
    term = torch.empty_like(total)
    for column in range(1, left.shape[1]):
        torch.mul(left[:, column : column + 1], right[column : column + 1], out=term)
        total.add_(term)
    return total.view(-1)


def _drawn(seed: int, rows: int, columns: int) -> Tensor:
    """Return random directions in -1 to 1, determined by the seed."""
    words = random_words(seed, rows * columns)
    values = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return torch.from_numpy(values).view(rows, columns)
