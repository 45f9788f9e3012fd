"""What members and reducers say to each other inside relay frames; the hub never looks at it.

A chunk is a msgpack `ChunkHead` behind a two-byte length, then raw encoded bytes. The encoded
vector of one member is a *packet* (one buffer, made by a codec), cut into chunks of
`CHUNK_BYTES`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from atoll.errors import FrameTooLarge, WireError
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

_LENGTH = struct.Struct("!H")

MAX_HEAD_BYTES = 65_535
"""Longest encoded head: its length is two bytes."""

ALL_TO_ALL = "parcels"
"""What stands for the codec in packets of a swap: parcels behind a table of theirs, no vector."""


class ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    """Which piece of which packet the bytes behind it are."""

    kind: str
    """`contribute` (member to reducer), `result` (reducer to member), or `resume`."""
    epoch: int
    round: int
    index: int
    """Piece number from 0; for `resume`: how many pieces of the result are here already."""
    count: int
    """Pieces of the packet."""
    total_bytes: int
    """Bytes of the packet."""
    codec: str
    """The codec's spec, e.g. `int8:256`, so that the reducer can decode it."""
    sizes: list[int]
    """Number of elements of each tensor in the packet."""
    weight: float
    """Weight of the contribution; in a result: the sum received."""
    contributors: list[str] = []
    """In a result: whose contributions are in it, in slot order."""
    have: list[int] = []
    """In a `resume`: indices of the result pieces that arrived."""
    phase: int = 0
    """Number of the exchange within the epoch: a round may take several, one after the other."""
    policy: str = ""
    """What the reducer does beyond averaging; the same from every member."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHead)


def pack_chunk(head: ChunkHead, piece: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return head bytes and piece, ready to be the parts of a relay frame.

    Raises:
        FrameTooLarge: the head has too many sizes or indices.
    """
    encoded = _encoder.encode(head)
    if len(encoded) > MAX_HEAD_BYTES:
        raise FrameTooLarge(
            "the head of a tensor chunk is too large",
            given=f"{len(encoded)} bytes",
            expected=f"at most {MAX_HEAD_BYTES} bytes",
            remedy="send the tensors as one flat vector",
        )
    return _LENGTH.pack(len(encoded)) + encoded, piece


def unpack_chunk(payload: memoryview) -> tuple[ChunkHead, memoryview]:
    """Return head and piece of a relay frame's payload.

    Raises:
        WireError: it is not a chunk, or its numbers contradict each other.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        head = _decoder.decode(payload[2 : 2 + length])
    except (struct.error, *MALFORMED) as error:
        raise WireError("a tensor chunk is malformed", given=str(error)) from error
    piece = payload[2 + length :]
    if head.kind != "resume":
        start = head.index * CHUNK_BYTES
        expected = min(CHUNK_BYTES, head.total_bytes - start)
        whole = head.total_bytes >= 0 and head.count == count_pieces(head.total_bytes)
        if not whole or not 0 <= head.index < head.count or len(piece) != expected:
            raise WireError(
                "a tensor chunk has the wrong size",
                given=f"{len(piece)} bytes as piece {head.index} of {head.count}",
                expected=f"{expected} bytes of a packet of {head.total_bytes}",
            )
    return head, piece


def count_pieces(total_bytes: int) -> int:
    """Return into how many pieces a packet is cut; an empty packet is one empty piece."""
    return max(1, -(-total_bytes // CHUNK_BYTES))


def pieces(packet: Buffer) -> Iterator[memoryview]:
    """Yield the pieces of a packet in order, as views. Its items may be larger than a byte."""
    view = memoryview(packet)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    for index in range(count_pieces(len(view))):
        yield view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
