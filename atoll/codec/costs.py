"""What a codec's arithmetic costs, for choosing one by the speed of the link.

One core of an AMD EPYC of 2025, torch on one thread: `python -m bench.codecs`, rounded. Another
machine has other speeds, but all members have to come to the same choice, so they share the table;
what decides is the ratio to the link's speed, and the choice is cautious by a factor (see `auto`).
fp16 and bf16 count like fp32: that they are measured faster is the fresh memory of a large packet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SPEEDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "fp32": (9e9, 10e9),
        "fp16": (9e9, 10e9),
        "bf16": (9e9, 10e9),
        "fp8": (2.3e9, 3.5e9),
        "int8": (3.2e9, 10.8e9),
        "sigma8": (0.9e9, 4.6e9),
        "int4": (2.2e9, 5.3e9),
        "e3m0": (1.5e9, 5.3e9),
        "int2": (1.0e9, 6.0e9),
        "sign": (3.0e9, 7.5e9),
        "qsgd": (0.9e9, 3.6e9),
    }
)
"""Name -> bytes of float32 that one core encodes and decodes per second; blocks of 256."""

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
