"""What the switch has to know of a packet: where it goes, and what it weighs on a real wire.

A packet here is what a TAP device with virtio headers hands out: 10 bytes of virtio header, then
an Ethernet frame. The kernel may hand out up to 64 KiB of one TCP stream as a single packet; on a
real wire it would be several, each with headers of its own.

    offset  size  field of the virtio header
    0       1     flags
    1       1     kind of segmentation; 0: none
    2       2     length of the headers of the frame
    4       2     payload of one segment
    6       4     checksum fields
"""

from __future__ import annotations

import struct

HEADER = struct.Struct("=BBHHHH")
HEADER_BYTES = HEADER.size
ETHERNET_BYTES = 14

MAC_PREFIX = b"\x02\x61\x74\x6c\x00"
"""Locally administered; the last byte is the number of the host."""


def mac_of(host: int) -> str:
    """Return the Ethernet address of a host."""
    return ":".join(f"{byte:02x}" for byte in (*MAC_PREFIX, host))


def receivers(packet: bytes, *, sender: int, hosts: int) -> list[int]:
    """Return the hosts that a packet is for; none for an unknown address."""
    target = packet[HEADER_BYTES : HEADER_BYTES + 6]
    if len(target) == 6 and target[0] & 1:  # broadcast or multicast
        return [host for host in range(hosts) if host != sender]
    if target[:5] == MAC_PREFIX and target[5] < hosts and target[5] != sender:
        return [target[5]]
    return []


def on_the_wire(packet: bytes) -> tuple[int, int]:
    """Return how many bytes and packets this is on a real wire, Ethernet headers included."""
    _, segmentation, header_bytes, segment_bytes, _, _ = HEADER.unpack_from(packet)
    frame_bytes = len(packet) - HEADER_BYTES
    payload_bytes = frame_bytes - header_bytes
    if not segmentation or not segment_bytes or payload_bytes <= segment_bytes:
        return frame_bytes, 1
    segments = -(-payload_bytes // segment_bytes)
    return frame_bytes + (segments - 1) * header_bytes, segments
