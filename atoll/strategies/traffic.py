"""Bytes of one exchange on the wire, by route.

Over the relay a packet that can hold a mean goes up once and comes back once; on the direct route
chunks go to their owners and means come back. Packets that cannot hold a mean are sent to all
members, which add them up. Only encoded values count, not headers, sizes or names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.codec.base import Codec
from atoll.group.collectives.topology import partition
from atoll.strategies.base import Traffic

WEIGHT_BYTES = 8
"""On the direct route every chunk is preceded by its sender's weight."""

ALIGNMENT = 1024
"""Chunks of the direct route are multiples of this many elements."""


def volume(codec: Codec, elements: int, peers: int, *, rank: int = 0) -> Traffic:
    """Return the bytes of one reduce of `elements` values among `peers` members."""
    if peers < 2:
        return Traffic(1, 0, 0, 0, 0)
    if codec.needs_allgather:
        return allgather_volume(codec, elements, peers)
    relay = codec.nbytes(elements)
    back = codec.base.nbytes(elements)
    sent, received = _direct(codec, elements, peers, rank)
    return Traffic(1, relay, back, sent, received)


def allgather_volume(codec: Codec, elements: int, peers: int) -> Traffic:
    """Return the bytes of one reduce by all-gather.

    Over the relay a packet goes up once for all receivers.
    """
    nbytes, others = codec.nbytes(elements), max(peers - 1, 0)
    return all_to_all_volume([(nbytes, others)] if others else [], [nbytes] * others)


def all_to_all_volume(messages: Sequence[tuple[int, int]], received: Sequence[int]) -> Traffic:
    """Return the bytes of one all-to-all.

    Args:
        messages: Size of each packet sent, and its number of receivers.
        received: Size of each packet received.
    """
    return Traffic(
        rounds=1,
        relay_sent_bytes=sum(nbytes for nbytes, _ in messages),
        relay_received_bytes=sum(received),
        direct_sent_bytes=sum(nbytes * others for nbytes, others in messages),
        direct_received_bytes=sum(received),
    )


def _direct(codec: Codec, elements: int, peers: int, rank: int) -> tuple[int, int]:
    """Return bytes sent and received by torch.distributed, see `atoll.group.routes.direct`."""
    if codec.base is codec and codec.spec == "fp32":
        ring = round(2 * (peers - 1) / peers * 4 * (elements + 2 * peers))
        return ring, ring
    block = math.lcm(int(getattr(codec.base, "block", 1)), ALIGNMENT)
    sizes = [codec.base.nbytes(size) for size in partition(elements, peers, block=block)]
    own, others = sizes[rank], sum(sizes) - sizes[rank]
    sent = others + WEIGHT_BYTES * (peers - 1) + own * (peers - 1)
    received = (own + WEIGHT_BYTES) * (peers - 1) + others
    return sent, received


def total(parts: list[Traffic]) -> Traffic:
    """Return the sum of several exchanges."""
    return Traffic(
        rounds=sum(part.rounds for part in parts),
        relay_sent_bytes=sum(part.relay_sent_bytes for part in parts),
        relay_received_bytes=sum(part.relay_received_bytes for part in parts),
        direct_sent_bytes=sum(part.direct_sent_bytes for part in parts),
        direct_received_bytes=sum(part.direct_received_bytes for part in parts),
    )


def times(part: Traffic, count: int) -> Traffic:
    """Return the traffic of `count` equal exchanges."""
    return Traffic(
        rounds=part.rounds * count,
        relay_sent_bytes=part.relay_sent_bytes * count,
        relay_received_bytes=part.relay_received_bytes * count,
        direct_sent_bytes=part.direct_sent_bytes * count,
        direct_received_bytes=part.direct_received_bytes * count,
    )
