"""randomk: send a random share of the elements, at the same positions on every member.

Only values are sent, so a mean of packets fits a packet, unlike with `topk`. Positions depend only
on the round's number: in blocks of 4096 elements a common permutation picks k, and the next round
takes the permutation's next k. Within ceil(4096/k) rounds every element is sent at least once, and
a vector may be cut between blocks without changing any positions.

Layout of a packet of n > 0 elements: the number of the round (8 bytes, int64, little endian), then
the packet of the values by the second codec.

`randomk:0.1` multiplies the sent values by 4096/k, so that the expected value is the vector itself.
`randomk:0.1:plain` does not; inside `feedback(...)` it is always plain, because unsent values
follow later anyway.

Random sparsification: Wangni et al. 2018, section 2 (https://arxiv.org/abs/1710.09854), without
their probabilities; without replacement as in Wang et al. 2023, "CocktailSGD".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.codec.quantized.packing import Bytes
from atoll.codec.seeds import mixed, permutation
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.selecting import Selecting, Where, check_density
from atoll.errors import ConfigError

WIDTH = 4096
"""Elements that share a permutation."""
_HEAD_BYTES = 8
_LARGEST = float(np.finfo(np.float32).max)


class RandomK(Selecting):
    """Random positions; see the module's docstring.

    Raises:
        ConfigError: `density` (share of the elements sent) is not 1/4096 to 1.
    """

    def __init__(self, density: float, values: Codec, *, scaled: bool = True) -> None:
        self.density, self.scaled = check_density("randomk", density), scaled
        if density * WIDTH < 1:
            raise ConfigError(
                "the density of codec randomk is too small", given=density,
                expected=f"at least one element of {WIDTH}", remedy="randomk:0.001",
            )  # fmt: skip
        head = f"randomk:{density:g}" if scaled else f"randomk:{density:g}:plain"
        super().__init__(head, values)
        self._per_block = self._of(WIDTH)
        inner = int(getattr(values, "block", 1))
        self.block = WIDTH * (inner // math.gcd(self._per_block, inner))
        """Elements after which the blocks of both codecs start again."""
        self._round = 0
        self._scales = scaled

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `randomk:density|values` or `randomk:density:plain|values`."""
        arguments.at_most(2)
        if arguments.values[1:] not in ((), ("plain",)):
            raise arguments.wrong()
        return cls(arguments.share(), *inner, scaled=len(arguments.values) < 2)

    @property
    def needs_allgather(self) -> bool:  # type: ignore[override]
        """As the second codec, because positions are common."""
        return self.values.needs_allgather

    def plain(self) -> RandomK:
        """Return this codec without the scaling."""
        return RandomK(self.density, self.values, scaled=False)

    def set_round(self, round_: int) -> None:
        """Select the positions of this round."""
        self._round = round_
        self.values.set_round(round_)

    def mean_codec(self, packet: Packet | None = None) -> RandomK:
        """Return the codec with the same positions and no further scaling."""
        other = RandomK(self.density, self.values, scaled=self.scaled)
        other._scales = False
        other._round = self._round
        if packet is not None and len(packet.data) >= _HEAD_BYTES:
            other._round = _round_of(np.frombuffer(packet.data, dtype=np.uint8))
        return other

    def _of(self, width: int) -> int:
        return max(1, int(width * self.density + 0.5)) if width else 0

    def count(self, elements: int) -> int:
        """Return the number of values sent."""
        full, rest = divmod(elements, WIDTH)
        return full * self._of(WIDTH) + self._of(rest)

    def where_bytes(self, elements: int) -> int:
        """Return the bytes of the round's number."""
        return _HEAD_BYTES if elements else 0

    def choose(self, x: Tensor, *, out: Bytes) -> Tensor:
        """Return the values at this round's positions."""
        if not x.numel():
            return torch.empty(0)
        np.copyto(out, np.array([self._round], dtype="<i8").view(np.uint8))
        chosen = torch.from_numpy(x.numpy()[self._positions(x.numel(), self._round)])
        if self._scales:
            full, rest = divmod(x.numel(), WIDTH)
            edge = full * self._per_block
            chosen[:edge].mul_(WIDTH / self._per_block)
            if rest:
                chosen[edge:].mul_(rest / self._of(rest))
            chosen.clamp_(-_LARGEST, _LARGEST)
        if not math.isfinite(float(x.sum(dtype=torch.float64))):
            # The non-finite values may not be at the sent positions: the packet MUST NOT be used.
            chosen.fill_(torch.nan)
        return chosen

    def where(self, data: Bytes, elements: int) -> Where:
        """Return the positions of the packet's round."""
        return self._positions(elements, _round_of(data))

    def _positions(self, elements: int, round_: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        full, rest = divmod(elements, WIDTH)
        parts = []
        if full:
            starts = np.arange(full)[:, None] * WIDTH
            parts.append((starts + chosen_positions(WIDTH, self._per_block, round_)).reshape(-1))
        if rest:
            parts.append(full * WIDTH + chosen_positions(rest, self._of(rest), round_))
        return np.concatenate(parts)


def _round_of(data: Bytes) -> int:
    return int(np.frombuffer(data[:_HEAD_BYTES].tobytes(), dtype="<i8")[0])


def chosen_positions(width: int, count: int, round_: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return `count` of `width` positions, ascending: each at least once per `width/count` rounds.

    ceil(width/count) rounds, from a multiple of that on, share a permutation.
    """
    cycle, phase = divmod(round_, -(-width // count))
    order = permutation(mixed("positions", cycle, width), width)
    first = min(phase * count, width - count)
    return np.sort(order[first : first + count])
