"""A replica small enough to simulate thousands: a vector, a round, and exact arithmetic."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

ELEMENTS = 12
_HEAD = struct.Struct("!q")


class Replica:
    """The common state of one member."""

    def __init__(self, vector: Tensor | None = None, *, round_: int = 0) -> None:
        self.vector = vector if vector is not None else torch.zeros(ELEMENTS)
        self.round = round_

    def apply(self, mean: Tensor) -> None:
        """Move by an agreed mean; not commutative, so that order and count of rounds show."""
        self.vector = (self.vector * 0.5 - mean).contiguous()
        self.round += 1

    def to_bytes(self) -> bytes:
        return _HEAD.pack(self.round) + self.vector.numpy().tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Replica:
        vector = torch.frombuffer(bytearray(data[_HEAD.size :]), dtype=torch.float32)
        return cls(vector, round_=_HEAD.unpack_from(data)[0])

    def digest(self) -> str:
        return digest_of(self.to_bytes())


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
