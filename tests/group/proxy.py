"""A TCP proxy that breaks or slows connections on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Passes connections on to a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._passed = 0
        self._limit: int | None = None
        self._forever = False
        self.was_cut = threading.Event()
        self.cuts = 0
        self.down_bps = 0.0
        """Bits per second towards the client; 0: as fast as it goes."""
        self.down_bytes = 0
        """Bytes passed to the client so far."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, passed_bytes: int, *, forever: bool = False) -> None:
        """Break all connections once so many more bytes have passed, both ways together."""
        with self._lock:
            self._limit, self._forever = self._passed + passed_bytes, forever

    def close(self) -> None:
        self._server.close()
        self._break()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                if self._forever and self.cuts:
                    near.close()
                    far.close()
                    continue
                self._open += [near, far]
            for source, target, down in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pump, args=(source, target), kwargs={"down": down}, daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, *, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16_384):
                target.sendall(data)
                if down and self.down_bps:
                    time.sleep(len(data) * 8 / self.down_bps)
                if self._counted(len(data), down=down):
                    self._break()
                    self.was_cut.set()
        for end in (source, target):
            end.close()

    def _counted(self, nbytes: int, *, down: bool) -> bool:
        """Count bytes and return whether it is time to break."""
        with self._lock:
            self._passed += nbytes
            self.down_bytes += nbytes if down else 0
            if self._limit is None or self._passed < self._limit:
                return False
            self._limit = None
            self.cuts += 1
            return True

    def _break(self) -> None:
        with self._lock:
            broken, self._open = self._open, []
        for end in broken:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
