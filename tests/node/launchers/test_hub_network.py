"""Connections from a program's own network to its hub."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from atoll.node.launchers.hub_network import HubForwarder
from tests.patience import PROMPT_S

resource = pytest.importorskip("resource", reason="limits of POSIX")


class Observed(socket.socket):
    """A listening socket that shows that it could not accept."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)
        self.failed = threading.Event()
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, object]:
        try:
            return super().accept()
        except OSError:
            self.failed.set()
            raise


def test_too_many_open_files_do_not_end_the_forwarding() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        listener = Observed()
        address = listener.getsockname()
        first_free = os.dup(listener.fileno())
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            forwarder = HubForwarder(listener, *hub.getsockname())
            assert listener.failed.wait(PROMPT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        hub.settimeout(PROMPT_S)
        with socket.create_connection(address, PROMPT_S) as program:
            program.sendall(b"ping")
            at_hub, _ = hub.accept()
            with at_hub:
                assert at_hub.recv(4) == b"ping"
        forwarder.close()
