"""Which part of a vector lies on which parameter server: consistent hashing of blocks.

Servers stand on a ring of hashes at many points each; a block belongs to the server that comes
next after its own hash. With another number of servers only the blocks move that have to.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

POINTS = 128
"""Points of each server on the ring."""
BLOCKS = 256
"""Blocks per server that a vector is cut into, unless they became smaller than `LEAST`."""
LEAST = 16


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def assign(blocks: int, servers: int) -> list[int]:
    """Return the server of every block."""
    ring = sorted((_hash(f"server {s} {k}"), s) for s in range(servers) for k in range(POINTS))
    keys = [key for key, _ in ring]
    return [ring[bisect.bisect(keys, _hash(f"block {b}")) % len(ring)][1] for b in range(blocks)]


class Shards:
    """The parts of one flat vector, by server; pure and the same on every member."""

    def __init__(self, parameters: int, elements: int, *, servers: int) -> None:
        """Cut a vector.

        Args:
            parameters: Leading elements that are dealt to all servers.
            elements: Of the vector; those behind the parameters (buffers) are the first server's.
            servers: How many, >= 1.
        """
        self.elements, self.num_parameters = elements, parameters
        size = max(LEAST, -(-parameters // (BLOCKS * servers))) if servers > 1 else parameters
        starts = list(range(0, parameters, size)) if size else []
        owners = assign(len(starts), servers) if servers > 1 else [0] * len(starts)
        self._parts: list[list[slice]] = [[] for _ in range(servers)]
        for start, owner in zip(starts, owners, strict=True):
            self._parts[owner].append(slice(start, min(parameters, start + size)))
        self.parameters = [sum(p.stop - p.start for p in parts) for parts in self._parts]
        """Elements of each part that are parameters."""
        self._tail = slice(parameters, elements)
        self.sizes = list(self.parameters)
        """Elements of each part."""
        self.sizes[0] += elements - parameters

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, vector: Tensor, number: int) -> Tensor:
        """Return a server's part of a vector: of all elements, or of the parameters only."""
        parts = self._slices(number, whole=vector.numel() == self.elements)
        if len(parts) == 1:
            return vector[parts[0]]
        return torch.cat([vector[part] for part in parts]) if parts else vector[:0]

    def put(self, vector: Tensor, number: int, values: Tensor) -> None:
        """Write a server's part into a vector."""
        at = 0
        for part in self._slices(number, whole=vector.numel() == self.elements):
            size = part.stop - part.start
            vector[part] = values[at : at + size]
            at += size

    def _slices(self, number: int, *, whole: bool) -> Sequence[slice]:
        parts = self._parts[number]
        if whole and number == 0 and self._tail.stop > self._tail.start:
            if parts and len(parts) == 1 and parts[0] == slice(0, self._tail.start):
                return [slice(0, self._tail.stop)]
            return [*parts, self._tail]
        return parts
