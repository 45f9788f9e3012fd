"""Pieces of messages between two members, inside relay frames; opaque to the hub.

  4 bytes `PIECE`, 2 bytes length, msgpack `PeerPiece`, bytes of the piece

A message is a head followed by data, cut into pieces of `CHUNK_BYTES`. The receiver acknowledges
whole messages, not pieces. The first byte distinguishes pieces from tensor chunks: as a head length
it would exceed any head.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec

from atoll.errors import WireError
from atoll.wire.chunks import count_pieces
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

PIECE = b"\xff\xffP>"
"""First bytes of every piece."""
MOST_MISSING = 1024
"""Indices in one answer; the sender asks again for the rest."""
MAX_MESSAGE_BYTES = 2**30
"""Largest message between two members."""

_LENGTH = struct.Struct("!H")


class PieceKind(StrEnum):
    """What a piece is."""

    PART = "part"
    TAKEN = "taken"
    """Answer: the message is complete and in the receiver's queue."""
    MISSING = "missing"
    """Answer to the last piece: others were lost."""
    REFUSED = "refused"
    """Answer: the receiver has no room for it, or cannot use it."""


class PeerPiece(msgspec.Struct, frozen=True, array_like=True):
    """Head of a piece."""

    kind: PieceKind
    number: int
    """Of the message, unique for the sender."""
    index: int = 0
    head_bytes: int = 0
    total_bytes: int = 0
    """Of the message, its head included."""
    reason: str = ""
    """Why it was refused."""
    missing: list[int] = []
    """Indices of the first pieces that were lost."""


_decoder = msgspec.msgpack.Decoder(PeerPiece)


def pack_piece(piece: PeerPiece, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return the parts of a relay frame."""
    encoded = msgspec.msgpack.encode(piece)
    return PIECE + _LENGTH.pack(len(encoded)) + encoded, body


def unpack_piece(payload: memoryview) -> tuple[PeerPiece, memoryview]:
    """Return head and body; raises WireError if they are malformed or contradict each other."""
    start = len(PIECE) + _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(payload, len(PIECE))
        piece = _decoder.decode(payload[start : start + length])
    except (struct.error, *MALFORMED) as error:
        raise WireError("a piece of a message is malformed", given=str(error)) from error
    body = payload[start + length :]
    if piece.kind is PieceKind.PART:
        expected = min(CHUNK_BYTES, piece.total_bytes - piece.index * CHUNK_BYTES)
        good = 0 <= piece.head_bytes <= piece.total_bytes <= MAX_MESSAGE_BYTES
        if not good or not 0 <= piece.index < count_pieces(piece.total_bytes):
            raise WireError("a piece of a message is out of range", given=str(piece))
        if len(body) != expected:
            raise WireError(
                "a piece of a message has the wrong size",
                given=f"{len(body)} bytes", expected=f"{expected} bytes",
            )  # fmt: skip
    return piece, body
