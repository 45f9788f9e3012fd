"""Base class of codecs that select values of a vector and encode these with another codec.

In `topk:0.1|int8` the first codec selects, the second encodes the selected values. All other
elements decode to zero. A packet is the positions (`where_bytes`), then the packet of the values by
the second codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless, check_packet, check_vector, output
from atoll.codec.quantized.packing import Bytes
from atoll.errors import ConfigError

Where = Any
"""Positions, as an index into a numpy vector."""


def check_density(name: str, density: float) -> float:
    """Return a share of the elements, rounded to the six digits of a spec.

    Raises:
        ConfigError: it is not above 0 and at most 1.
    """
    if 0.0 < density <= 1.0:
        return float(f"{density:g}")
    raise ConfigError(
        f"the density of codec {name} is out of range",
        given=density,
        expected="above 0 and at most 1",
        remedy=f"{name}:0.01 sends one number of 100",
    )


class Selecting(Stateless, ABC):
    """Selects values and encodes them with another codec.

    `head` is the spec without the second codec, which is omitted if it is fp32.
    """

    def __init__(self, head: str, values: Codec) -> None:
        self.values = values
        self.spec = head if values.spec == "fp32" else f"{head}|{values.spec}"

    @abstractmethod
    def count(self, elements: int) -> int:
        """Return the number of selected values of a vector."""

    @abstractmethod
    def where_bytes(self, elements: int) -> int:
        """Return the bytes of the positions."""

    @abstractmethod
    def choose(self, x: Tensor, *, out: Bytes) -> Tensor:
        """Return the selected values, shape (count,), and write their positions into `out`."""

    @abstractmethod
    def where(self, data: Bytes, elements: int) -> Where:
        """Return the positions in the order of the values; raises WireError if they are damaged."""

    def set_round(self, round_: int) -> None:
        """Set the round of the second codec."""
        self.values.set_round(round_)

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return self.where_bytes(elements) + self.values.nbytes(self.count(elements))

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        x = check_vector(x, role="the input")
        elements = x.numel()
        data, edge = np.empty(self.nbytes(elements), dtype=np.uint8), self.where_bytes(elements)
        chosen = self.choose(x, out=data[:edge])
        packet = self.values.encode(chosen, key=key)
        np.copyto(data[edge:], np.frombuffer(packet.data, dtype=np.uint8))
        return Packet(data.data, self.spec, (elements,))

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        elements = check_packet(packet, self)
        result = output(out, elements).zero_()
        if elements:
            where, values = self._open(packet, elements)
            result.numpy()[where] = values.numpy()
        return result

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`, changing only the selected elements."""
        elements = check_packet(packet, self)
        result = output(out, elements)
        if elements:
            where, values = self._open(packet, elements)
            if weight != 1.0:
                values.mul_(weight)
            with np.errstate(over="ignore", invalid="ignore"):  # callers check the sum
                result.numpy()[where] += values.numpy()

    def _open(self, packet: Packet, elements: int) -> tuple[Where, Tensor]:
        data = np.frombuffer(packet.data, dtype=np.uint8)
        edge = self.where_bytes(elements)
        inner = Packet(data[edge:].data, self.values.spec, (self.count(elements),))
        values = torch.empty(self.count(elements))
        return self.where(data[:edge], elements), self.values.decode(inner, out=values)
