"""Requests to parameter servers and their answers, as pieces on the relay.

A frame is two zero bytes, a two-byte length, a msgpack `ServerFrameHead` and a piece of the packet.
The zeros distinguish it from a tensor chunk, which begins with a head length above zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from atoll.errors import WireError
from atoll.wire.chunks import count_pieces, encode_head
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

MARK = b"\0\0"
"""First bytes of every such frame."""

_LENGTH = struct.Struct("!H")


class ServerFrameHead(msgspec.Struct, frozen=True, array_like=True):
    """Identifies the piece that follows, or lists the pieces that one side has received."""

    kind: str
    """`ask`, `answer`, `look` (member: which pieces of the answer are here), `have` (server: which
    pieces of the ask are here), or `ping`."""
    call: int
    """Identifies the ask; its answer has the same."""
    index: int = 0
    count: int = 1
    total_bytes: int = 0
    body: bytes = b""
    """In the first piece: the encoded `Ask` or `Answer`."""
    have: list[int] = []
    """Pieces received: of the answer in a `look`, of the ask in a `have`."""


_decoder = msgspec.msgpack.Decoder(ServerFrameHead)


def is_server_frame(payload: memoryview) -> bool:
    """Return whether a relayed payload belongs to a parameter server."""
    return payload[: len(MARK)] == MARK


def pack_frame(head: ServerFrameHead, piece: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return head bytes and piece, the parts of a relay frame."""
    encoded = encode_head(head)
    return MARK + _LENGTH.pack(len(encoded)) + encoded, piece


def unpack_frame(payload: memoryview) -> tuple[ServerFrameHead, memoryview]:
    """Return head and piece; raises WireError if the frame is malformed or contradicts itself."""
    try:
        (length,) = _LENGTH.unpack_from(payload, len(MARK))
        start = len(MARK) + _LENGTH.size
        head = _decoder.decode(payload[start : start + length])
    except (struct.error, *MALFORMED) as error:
        raise WireError("a frame of a parameter server is malformed", given=str(error)) from error
    piece = payload[start + length :]
    if head.kind in ("ask", "answer"):
        expected = min(CHUNK_BYTES, head.total_bytes - head.index * CHUNK_BYTES)
        whole = head.total_bytes >= 0 and head.count == count_pieces(head.total_bytes)
        if not whole or not 0 <= head.index < head.count or len(piece) != max(0, expected):
            raise WireError(
                "a piece of an ask or answer has the wrong size",
                given=f"{len(piece)} bytes as piece {head.index} of {head.count}",
                expected=f"{expected} bytes of {head.total_bytes}",
            )
    return head, piece


def frames(
    kind: str, call: int, body: bytes, data: Buffer, *, skip: frozenset[int] = frozenset()
) -> Iterator[tuple[bytes, Buffer]]:
    """Yield the frames of an ask or answer, without the pieces in `skip`."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    count = count_pieces(len(view))
    for index in range(count):
        if index not in skip:
            head = ServerFrameHead(kind, call, index, count, len(view), body if index == 0 else b"")
            yield pack_frame(head, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@dataclass(slots=True)
class Pieces:
    """The pieces received so far of an ask or answer."""

    call: int
    total_bytes: int
    data: bytearray | memoryview
    """`total_bytes` of writable memory."""
    body: bytes = b""
    have: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every piece has arrived."""
        return len(self.have) == count_pieces(self.total_bytes)

    def put(self, head: ServerFrameHead, piece: memoryview) -> bool:
        """Store a piece and return whether it was new. Pieces of another packet are ignored."""
        if head.total_bytes != self.total_bytes or head.index in self.have:
            return False
        start = head.index * CHUNK_BYTES
        self.data[start : start + len(piece)] = piece
        self.have.add(head.index)
        if head.index == 0:
            self.body = head.body
        return True
