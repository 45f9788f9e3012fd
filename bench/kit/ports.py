"""Ports that are known before anything listens on them, and that stay free meanwhile."""

from __future__ import annotations

import os
import random
import socket

LOWEST, HIGHEST = 10_000, 30_000
"""Below those that the system gives to a process that asks for any port, as connections do."""

_choice = random.Random(os.getpid())


def free_port() -> int:
    """Return a port of the loopback without a listener; each is given once in a while only."""
    while True:
        port = _choice.randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))  # some listen at all addresses
            except OSError:
                continue
        return port
