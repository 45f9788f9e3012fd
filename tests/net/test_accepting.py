"""Listeners go on when one connection cannot be accepted, or gets no thread."""

from __future__ import annotations

import errno
import socket
import threading

from atoll.net.accepting import accepted, serve_on_thread, stop_listening
from tests.patience import PATIENCE_S, PROMPT_S
from tests.thread_limit import no_more_threads


class OutOfFiles(socket.socket):
    """A listener in a process that has no file descriptor left when the first member connects."""

    failures = 1

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_a_connection_that_fails_does_not_end_the_listener() -> None:
    with OutOfFiles() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        connections = accepted(listener, threading.Event())
        with socket.create_connection(listener.getsockname()) as caller:
            connection, address = next(connections)
            with connection:
                assert address == caller.getsockname()


def test_an_accepting_thread_ends_with_its_listener() -> None:
    listener, closed = socket.create_server(("127.0.0.1", 0)), threading.Event()
    thread = threading.Thread(target=lambda: list(accepted(listener, closed)))
    thread.start()
    stop_listening(listener, closed)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_connection_without_a_thread_is_closed() -> None:
    near, far = socket.socketpair()
    near.settimeout(PROMPT_S)
    refused, served = threading.Event(), threading.Event()
    with near:
        with no_more_threads("test"):
            serve_on_thread(far, lambda _: served.set(), name="test", refused=refused.set)
        assert near.recv(1) == b""
    assert refused.is_set()
    assert not served.is_set()
