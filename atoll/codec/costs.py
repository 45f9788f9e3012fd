"""What a codec's arithmetic costs, for choosing one by the speed of the link.

One core of an AMD EPYC of 2025, torch on one thread: `python -m bench.codecs`, rounded. Another
machine has other speeds, but all members have to come to the same choice, so they share the table;
what decides is the ratio to the link's speed, and the choice is cautious by a factor (see `auto`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SPEEDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "fp32": (12e9, 12e9),
        "fp16": (9e9, 8e9),
        "bf16": (9e9, 10e9),
        "fp8": (2.7e9, 4e9),
        "int8": (4e9, 8e9),
        "sigma8": (1.5e9, 5e9),
        "int4": (2.5e9, 5.8e9),
        "e3m0": (1.8e9, 5.9e9),
        "int2": (1.2e9, 7.4e9),
        "sign": (3.5e9, 8e9),
        "qsgd": (1e9, 4e9),
    }
)
"""Name -> bytes of float32 that one core encodes and decodes per second."""

UNKNOWN = (0.5e9, 2e9)
"""For codecs that are not in the table: choosing numbers costs more than rounding them."""


def seconds(spec: str, *, elements: int, nbytes: int, bytes_per_s: float) -> float:
    """Return how long one mean takes a member: encode, send, wait for the mean, decode.

    The place that adds up decodes and encodes too, beside the transfer of others; its share of
    one member's vector is counted once.

    Args:
        spec: Of the codec.
        elements: Of the vector.
        nbytes: Of a packet.
        bytes_per_s: Of the link, one way.
    """
    encode, decode = SPEEDS.get(spec.partition(":")[0], UNKNOWN)
    return 2 * 4 * elements * (1 / encode + 1 / decode) + 2 * nbytes / bytes_per_s
