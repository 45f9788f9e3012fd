"""Connections from a program's own network to its hub."""

from __future__ import annotations

import errno
import socket
import threading

from atoll.node.launchers.hub_network import HubForwarder
from tests.patience import PROMPT_S


class OutOfFiles(socket.socket):
    """A listener in a process that has no file descriptor left when a program connects."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)
        self.failed = threading.Event()
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, object]:
        if not self.failed.is_set():
            self.failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_too_many_open_files_do_not_end_the_forwarding() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        listener = OutOfFiles()
        address = listener.getsockname()
        forwarder = HubForwarder(listener, *hub.getsockname())
        assert listener.failed.wait(PROMPT_S)
        hub.settimeout(PROMPT_S)
        with socket.create_connection(address, PROMPT_S) as program:
            program.sendall(b"ping")
            at_hub, _ = hub.accept()
            with at_hub:
                assert at_hub.recv(4) == b"ping"
        forwarder.close()
