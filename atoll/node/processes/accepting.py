"""Listening sockets from which one thread accepts until another one closes them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

RETRY_S = 0.1
"""Pause after an error, e.g. too many open files; connections wait in the backlog meanwhile."""


def accepted(
    listener: socket.socket, closed: threading.Event
) -> Iterator[tuple[socket.socket, Any]]:
    """Yield each connection and its peer's address, until `stop_listening`."""
    while not closed.is_set():
        try:
            connection = listener.accept()
        except OSError:
            closed.wait(RETRY_S)
        else:
            yield connection


def stop_listening(listener: socket.socket, closed: threading.Event) -> None:
    """Close a listening socket and end the thread that accepts from it."""
    closed.set()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # on Linux, closing does not wake the other thread
    listener.close()
