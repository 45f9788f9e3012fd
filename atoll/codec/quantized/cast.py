"""Codecs that only change the number format: fp32, fp16 and bf16, little endian.

fp16 has 11 bits of precision but ends at 65504: larger values decode to infinity, which checks for
finite values detect. bf16 has the range of fp32 and 8 bits of precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.spec import Arguments

STRIP = 32_000
"""Elements processed at once: 125 KiB of float32 stay in a core's own cache through all passes, and
below 32768 elements torch never uses its thread pool, so that results and speed do not depend on
the number of threads."""


@dataclass(frozen=True, slots=True)
class _Format:
    dtype: torch.dtype
    carrier: type[np.generic]
    """numpy type of the same width; numpy has no bfloat16."""


_FORMATS = {
    "fp32": _Format(torch.float32, np.float32),
    "fp16": _Format(torch.float16, np.float16),
    "bf16": _Format(torch.bfloat16, np.int16),
}


class Cast(Stateless):
    """Sends each element in another format (`fp32`, `fp16` or `bf16`), rounded half to even."""

    def __init__(self, name: str) -> None:
        self.spec = name
        self._format = _FORMATS[name]
        self._width = self._format.dtype.itemsize

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `fp32`, `fp16` or `bf16`."""
        arguments.at_most(0)
        return cls(arguments.name)

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return elements * self._width

    @property
    def grain(self) -> int:
        """Cuts must be at multiples of this many elements."""
        return 1

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """One number after the other."""
        return ((1, self._width),)

    def cut(self, packet: Packet, start: int, stop: int) -> Packet:
        """Return the packet of the elements from `start` to `stop`, without a copy."""
        check_packet(packet, self)
        part = memoryview(packet.data)[start * self._width : stop * self._width]
        return Packet(part, self.spec, (stop - start,))

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        data = np.empty(self.nbytes(x.numel()), dtype=np.uint8)
        if len(data):
            torch.from_numpy(data).view(self._format.dtype).copy_(x)
        return Packet(data.data, self.spec, (x.numel(),))

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        for start, end, strip in self._strips(packet, elements):
            result[start:end].copy_(strip)
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        scratch = torch.empty(min(STRIP, elements))
        for start, end, strip in self._strips(packet, elements):
            part = scratch[: end - start]
            part.copy_(strip)
            if weight != 1.0:
                part.mul_(weight)
            # Multiply and add separately: fused, the rounding would depend on the machine.
            result[start:end].add_(part)

    def _strips(self, packet: Packet, elements: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield start, end and the elements between, in the packet's own format."""
        # A received buffer may be read-only and unaligned: copying one strip, inside the cache,
        # gives torch aligned memory.
        carried = np.empty(min(STRIP, elements), dtype=self._format.carrier)
        typed = torch.from_numpy(carried).view(self._format.dtype)
        source = np.frombuffer(packet.data, dtype=self._format.carrier)
        for start in range(0, elements, STRIP):
            end = min(start + STRIP, elements)
            np.copyto(carried[: end - start], source[start:end])
            yield start, end, typed[: end - start]
