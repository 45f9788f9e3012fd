"""Frames: the layout of a message or a chunk of a tensor in one WebSocket binary message.

  offset  size  field
  0       2     magic, b"AT"
  2       1     protocol version
  3       1     kind: 1 control, 2 relay
  4       4     body length, big endian
  8       4     CRC-32 of the body, big endian
  12            body

The body of a *control* frame is one msgpack `Envelope`. The body of a *relay* frame is

  1 byte length + destination address, 1 byte length + source address, opaque bytes

The hub reads the two addresses and forwards the bytes unchanged. The receiver verifies the checksum
of a relay frame; the hub verifies it for control frames only.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from atoll.errors import FrameTooLarge, VersionMismatch, WireError
from atoll.wire.limits import MAX_CONTROL_BYTES, MAX_RELAY_BYTES, PROTOCOL

MAGIC = b"AT"
HEADER = struct.Struct("!2sBBII")
HEADER_BYTES = HEADER.size

Buffer = bytes | bytearray | memoryview

MAX_ADDRESS_BYTES = 255
"""Longest session id: its length is stored in one byte."""


class Kind(IntEnum):
    """Kind of a frame's body."""

    CONTROL = 1
    RELAY = 2


_LIMITS = {Kind.CONTROL: MAX_CONTROL_BYTES, Kind.RELAY: MAX_RELAY_BYTES}


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame: `body` is a view into `raw`, the whole message, kept for forwarding."""

    kind: Kind
    body: memoryview
    raw: Buffer


@dataclass(frozen=True, slots=True)
class Relay:
    """Addresses and payload of a relay frame."""

    to: str
    source: str
    payload: memoryview


def encode(kind: Kind, *parts: Buffer) -> bytes:
    """Return one frame; its body is the concatenation of the parts.

    Raises:
        FrameTooLarge: the body exceeds the limit of its kind.
    """
    length = sum(memoryview(part).nbytes for part in parts)
    if length > _LIMITS[kind]:
        raise FrameTooLarge(
            f"a {kind.name.lower()} frame is too large to send",
            given=f"{length} bytes",
            expected=f"at most {_LIMITS[kind]} bytes",
        )
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((HEADER.pack(MAGIC, PROTOCOL, kind, length, checksum), *parts))


def decode(message: Buffer) -> Frame:
    """Return the frame in one WebSocket message. Verifies the checksum of control frames only.

    Raises:
        WireError: not a frame, truncated, or its checksum differs.
        VersionMismatch: another protocol version.
        FrameTooLarge: the body exceeds the limit of its kind.
    """
    if len(message) < HEADER_BYTES:
        raise WireError("a frame is cut short", given=f"{len(message)} bytes", expected=">= 12")
    magic, version, kind_number, length, checksum = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise WireError("this is not a frame of Atoll", given=repr(magic), expected=repr(MAGIC))
    if version != PROTOCOL:
        raise VersionMismatch(
            "the other side uses another version of the protocol",
            given=f"version {version}",
            expected=f"version {PROTOCOL}",
            remedy="install the same version of Atoll on both machines",
        )
    try:
        kind = Kind(kind_number)
    except ValueError:
        raise WireError("unknown kind of frame", given=kind_number, expected="1 or 2") from None
    if length > _LIMITS[kind]:
        raise FrameTooLarge(
            f"a {kind.name.lower()} frame is too large",
            given=f"{length} bytes",
            expected=f"at most {_LIMITS[kind]} bytes",
        )
    if len(message) - HEADER_BYTES != length:
        raise WireError(
            "the length of a frame is wrong",
            given=f"{len(message) - HEADER_BYTES} bytes of body",
            expected=f"{length} as its header says",
        )
    frame = Frame(kind, memoryview(message)[HEADER_BYTES:], message)
    if kind is Kind.CONTROL and zlib.crc32(frame.body) != checksum:
        raise WireError("the checksum of a frame differs", given=kind.name)
    return frame


def encode_relay(to: str, source: str, *parts: Buffer) -> bytes:
    """Return a relay frame between two session ids.

    Raises:
        WireError: an address is longer than 255 bytes.
        FrameTooLarge: the body exceeds the limit of relay frames.
    """
    to_bytes, source_bytes = to.encode(), source.encode()
    if max(len(to_bytes), len(source_bytes)) > MAX_ADDRESS_BYTES:
        raise WireError(
            "an address is too long",
            given=f"{to!r} and {source!r}",
            expected=f"at most {MAX_ADDRESS_BYTES} bytes each",
        )
    head = bytes((len(to_bytes),)) + to_bytes + bytes((len(source_bytes),)) + source_bytes
    return encode(Kind.RELAY, head, *parts)


def decode_relay(frame: Frame) -> Relay:
    """Return addresses and payload, checksum unverified; raises WireError if malformed."""
    body = frame.body
    try:
        to_end = 1 + body[0]
        source_end = to_end + 1 + body[to_end]
        if source_end > len(body):
            raise IndexError
        to, source = str(body[1:to_end], "utf-8"), str(body[to_end + 1 : source_end], "utf-8")
    except (IndexError, UnicodeDecodeError):
        raise WireError("the addresses of a relay frame are malformed") from None
    return Relay(to, source, body[source_end:])


def verify(frame: Frame) -> None:
    """Verify the checksum of a relay frame; raises WireError if it differs."""
    if zlib.crc32(frame.body) != HEADER.unpack_from(frame.raw)[4]:
        raise WireError("the checksum of a frame differs", given=frame.kind.name)
