"""A proxy that keeps, changes and inserts bytes of what members send each other."""

from __future__ import annotations

import contextlib
import socket
import threading

from atoll.group.routes.rendezvous_store import split_host_port


class Middle:
    """A proxy in front of a listener: it keeps all bytes, and may change one or put some in."""

    def __init__(self, dial: str) -> None:
        self._behind = split_host_port(dial)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.dial = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.received = bytearray()
        self.change_at = self.insert_at = -1
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._behind)
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65_536)):
                with self._lock:
                    at, self.received = len(self.received), self.received + data
                    if at <= self.change_at < at + len(data):
                        data[self.change_at - at] ^= 1
                    if at <= self.insert_at < at + len(data):
                        data[self.insert_at - at : self.insert_at - at] = data[:100]
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        for end in self._open:
            end.close()
