"""by_role: encode matrices with one codec and all other tensors with another.

`by_role(topk:0.01,bf16)` sends a model's few large matrices sparsely, and biases, norms and other
one-dimensional tensors, which are small but matter, as bf16. A packet is self-describing; little
endian:

  offset     size     field
  0          4        number of runs, uint32
  4          4*r      elements of each, uint32: of matrices, of others, of matrices ...
  4 + 4*r    ...      the packet of all matrices, then that of all others

Before `set_shapes`, and for vectors of another length, everything is one run of matrices. The runs
belong to a whole vector, which therefore cannot be cut into chunks; members all-gather the packets
and add them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, check_vector, output
from atoll.codec.lowrank import LowRank
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.wrapper import Wrapper, wrong_codec
from atoll.errors import ConfigError, WireError

_MOST_RUNS = 1 << 20  # a packet with more is damaged


class ByRole(Wrapper):
    """Uses `matrices` for tensors with two or more dimensions, and `others` for the rest.

    Raises:
        ConfigError: one of them is wrapped or uses shapes itself.
    """

    needs_allgather = True

    def __init__(self, matrices: Codec, others: Codec) -> None:
        self.spec = f"by_role({matrices.spec},{others.spec})"
        for codec in (matrices, others):
            if codec.base is not codec or isinstance(codec, ByRole | LowRank):
                raise ConfigError(
                    "by_role chooses between two plain codecs that do not depend on shapes",
                    given=repr(self.spec), expected="e.g. by_role(topk:0.01,bf16)",
                    remedy="put the wrapper outside: feedback(by_role(topk:0.01,bf16))",
                )  # fmt: skip
        super().__init__([matrices, others])
        self.matrices, self.others = matrices, others
        self._runs: list[int] = []

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `by_role(matrices,others)`."""
        arguments.at_most(0)
        if len(inner) != 2:
            raise ConfigError(
                "by_role takes a codec for matrices and one for all else",
                given=repr(arguments.spec), expected=f"e.g. {arguments.example}",
            )  # fmt: skip
        return cls(*inner)

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Set which parts of a vector are matrices."""
        runs = [0]
        for shape in shapes:
            # Runs at even positions are matrices.
            if (len(runs) % 2 == 1) != (len(shape) > 1):
                runs.append(0)
            runs[-1] += math.prod(shape)
        self._runs = runs

    def _of(self, elements: int) -> list[int]:
        return self._runs if self._runs and sum(self._runs) == elements else [elements]

    def _length(self, runs: Sequence[int]) -> int:
        first, second = sum(runs[::2]), sum(runs[1::2])
        return 4 + 4 * len(runs) + self.matrices.nbytes(first) + self.others.nbytes(second)

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet for the current shapes."""
        return self._length(self._of(elements))

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return this codec: a mean has no special format."""
        return self

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        runs = self._of(x.numel())
        head = np.array([len(runs), *runs], dtype="<u4").tobytes()
        parts = torch.split(x, runs)
        packets = [
            codec.encode(torch.cat([x[:0], *some]), key=f"{key}/{number}")
            for number, (codec, some) in enumerate(
                [(self.matrices, parts[::2]), (self.others, parts[1::2])]
            )
        ]
        data = bytearray(b"".join([head, *(packet.data for packet in packets)]))
        return Packet(data, self.spec, (x.numel(),))

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        runs, found = self._open(packet)
        result = output(out, packet.num_elements)
        for number, part in enumerate(torch.split(result, runs)):
            part.copy_(found[number % 2][: len(part)])
            found[number % 2] = found[number % 2][len(part) :]
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        runs, found = self._open(packet)
        result = output(out, packet.num_elements)
        if weight != 1.0:
            found = [vector.mul_(weight) for vector in found]
        for number, part in enumerate(torch.split(result, runs)):
            part.add_(found[number % 2][: len(part)])
            found[number % 2] = found[number % 2][len(part) :]

    def _open(self, packet: Packet) -> tuple[list[int], list[Tensor]]:
        """Return the runs, and the matrices' and the others' values.

        Raises:
            WireError: the packet is of another codec, or contradicts itself.
        """
        if packet.codec != self.spec:
            raise wrong_codec(packet, repr(self.spec))
        data = memoryview(packet.data)
        count = int.from_bytes(data[:4], "little") if len(data) >= 4 else _MOST_RUNS
        runs = [-1]
        if 0 < count < _MOST_RUNS and len(data) >= 4 + 4 * count:
            runs = np.frombuffer(data, dtype="<u4", offset=4, count=count).tolist()
        fits = min(packet.sizes, default=0) >= 0 and sum(runs) == packet.num_elements
        if not fits or self._length(runs) != len(data):
            raise WireError(
                f"a packet of codec {self.spec} has the wrong length",
                given=f"{len(data)} bytes for sizes {packet.sizes}",
                expected="the bytes of the runs that it begins with",
            )
        first, second = sum(runs[::2]), sum(runs[1::2])
        at = 4 + 4 * len(runs)
        edge = at + self.matrices.nbytes(first)
        return runs, [
            self.matrices.decode(Packet(data[at:edge], self.matrices.spec, (first,))),
            self.others.decode(Packet(data[edge:], self.others.spec, (second,))),
        ]
