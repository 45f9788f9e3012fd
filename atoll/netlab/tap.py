"""TAP devices: network cards whose cable ends in this process."""

from __future__ import annotations

import os
import struct

DEVICE = "/dev/net/tun"

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP4, _OFFLOAD_TCP6 = 1, 2, 4

LARGEST_PACKET_BYTES = 70_000
"""64 KiB of a segmented stream, and headers."""


def open_tap(name: str) -> int:
    """Make a TAP device in the present namespace; return its file descriptor, not blocking.

    It lives as long as the descriptor, and stays attached when it is moved to another namespace.
    Packets carry virtio headers (see `packets`): the kernel leaves segmenting to the receiver,
    which saves most of the work per byte.
    """
    import fcntl  # POSIX only, and this module is imported everywhere

    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TCP4 | _OFFLOAD_TCP6)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
