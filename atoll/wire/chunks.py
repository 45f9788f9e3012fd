"""Chunks of tensors inside relay frames, between members and reducers; opaque to the hub.

A chunk is a two-byte length, a msgpack `ChunkHead` and raw encoded bytes. The encoded vector of
one member is a *packet* (one buffer, made by a codec), cut into chunks of `CHUNK_BYTES`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from atoll.errors import FrameTooLarge, WireError
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

_LENGTH = struct.Struct("!H")

MAX_HEAD_BYTES = 65_535
"""Largest encoded head: its length is stored in two bytes."""

ALL_TO_ALL = "all-to-all"
"""Codec name in packets of an all-to-all, which hold a table of messages instead of a vector."""


class ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    """Identifies the piece of a packet that follows it."""

    kind: str
    """`contribute` (to the reducer), `result`, `early` or `refused` (to a member), `resume` (both
    ways). Pieces that are `early` count only if the ones of the result are of the same mean."""
    epoch: int
    round: int
    index: int
    """Piece number from 0; in a `resume`: number of pieces already received."""
    count: int
    """Number of pieces; in a `resume`: 1 to ask for a `resume` in return, else 0."""
    total_bytes: int
    codec: str
    """The codec's spec, e.g. `int8:256`, which the reducer needs for decoding."""
    sizes: list[int]
    """Number of elements of each tensor in the packet."""
    weight: float
    """Weight of the contribution; in a result: the sum of the weights received."""
    contributors: list[str] = []
    """In a result: the members that contributed, in slot order."""
    have: list[int] = []
    """In a `resume`: indices of the pieces already received."""
    phase: int = 0
    """Number of the exchange within the epoch: a round may run several in sequence."""
    aggregation: str = ""
    """How the reducer aggregates; MUST be the same from every member."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHead)


class ListsPieces(Protocol):
    """A head that lists the pieces received."""

    @property
    def have(self) -> list[int]:
        """Numbers of the pieces."""
        ...


def encode_head(head: ListsPieces) -> bytes:
    """Return a head as msgpack, with so much of its list of pieces as fits.

    What the list does not name is only sent again.
    """
    encoded = _encoder.encode(head)
    while len(encoded) > MAX_HEAD_BYTES and head.have:
        changed: Any = head
        head = msgspec.structs.replace(changed, have=head.have[: len(head.have) * 3 // 4])
        encoded = _encoder.encode(head)
    return encoded


def pack_chunk(head: ChunkHead, piece: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return the parts of a relay frame; raises FrameTooLarge if the head has too many entries."""
    encoded = encode_head(head)
    if len(encoded) > MAX_HEAD_BYTES:
        raise FrameTooLarge(
            "the head of a tensor chunk is too large",
            given=f"{len(encoded)} bytes",
            expected=f"at most {MAX_HEAD_BYTES} bytes",
            remedy="send the tensors as one flat vector",
        )
    return _LENGTH.pack(len(encoded)) + encoded, piece


def unpack_chunk(payload: memoryview) -> tuple[ChunkHead, memoryview]:
    """Return head and piece; raises WireError if they are malformed or contradict each other."""
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
    """Return the number of pieces of a packet; an empty packet is one empty piece."""
    return max(1, -(-total_bytes // CHUNK_BYTES))


def pieces(packet: Buffer) -> Iterator[memoryview]:
    """Yield the pieces in order, as views. The packet's items may be larger than a byte."""
    view = memoryview(packet)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    for index in range(count_pieces(len(view))):
        yield view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
