"""What members and reducers say to each other inside relay frames; the hub never looks at it.

A chunk is a msgpack `ChunkHead` behind a two-byte length, then raw encoded bytes. The encoded
vector of one member is a *packet* (one buffer, made by a codec), cut into chunks of
`CHUNK_BYTES`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from atoll.errors import WireError
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES

_LENGTH = struct.Struct("!H")


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHead)


def pack_chunk(head: ChunkHead, piece: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return head bytes and piece, ready to be the parts of a relay frame."""
    encoded = _encoder.encode(head)
    return _LENGTH.pack(len(encoded)) + encoded, piece


def unpack_chunk(payload: memoryview) -> tuple[ChunkHead, memoryview]:
    """Return head and piece of a relay frame's payload.

    Raises:
        WireError: it is not a chunk, or its numbers contradict each other.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        head = _decoder.decode(payload[2 : 2 + length])
    except (struct.error, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError("a tensor chunk is malformed", given=str(error)) from error
    piece = payload[2 + length :]
    if head.kind != "resume":
        start = head.index * CHUNK_BYTES
        expected = min(CHUNK_BYTES, head.total_bytes - start)
        if not 0 <= head.index < head.count or len(piece) != max(expected, 0):
            raise WireError(
                "a tensor chunk has the wrong size",
                given=f"{len(piece)} bytes as piece {head.index} of {head.count}",
                expected=f"{expected} bytes",
            )
    return head, piece


def count_pieces(total_bytes: int) -> int:
    """Return into how many pieces a packet is cut; an empty packet is one empty piece."""
    return max(1, -(-total_bytes // CHUNK_BYTES))


def pieces(packet: Buffer) -> Iterator[memoryview]:
    """Yield the pieces of a packet in order, as views."""
    view = memoryview(packet)
    for index in range(count_pieces(len(view))):
        yield view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
