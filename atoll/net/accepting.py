"""Listening sockets from which one thread accepts until another one closes them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

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
            continue
        if closed.is_set():
            connection[0].close()
            return
        yield connection


def serve_on_thread(
    connection: socket.socket,
    serve: Callable[..., None],
    *arguments: Any,
    name: str,
    refused: Callable[[], None] = lambda: None,
) -> None:
    """Call `serve(connection, *arguments)` on a new thread.

    If the system allows no more threads, call `refused` and close the connection instead.
    """
    thread = threading.Thread(target=serve, args=(connection, *arguments), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("a connection was closed (%s): %s", name, error)
        refused()
        connection.close()


def stop_listening(listener: socket.socket, closed: threading.Event) -> None:
    """Close a listening socket and end the thread that accepts from it."""
    closed.set()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # on Linux, closing does not wake the other thread
    listener.close()
