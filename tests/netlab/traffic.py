"""Traffic inside a lab: `serve`, `ping COUNT`, `push BYTES`; prints a result a line."""

from __future__ import annotations

import socket
import sys
import time

from tests.patience import PATIENCE_S

PORT = 7000
NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def serve() -> None:
    """Answer each `p` with itself and each message that ends with `e` with `d`."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("0.0.0.0", PORT))
        listening.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.setsockopt(*NO_DELAY)
                while block := connection.recv(1 << 20):
                    if block == b"p":
                        connection.sendall(b"p")
                    elif block.endswith(b"e"):
                        connection.sendall(b"d")


def ping(count: int) -> None:
    """Print the seconds of each round trip."""
    with socket.create_connection(("h0", PORT), timeout=PATIENCE_S) as connection:
        connection.setsockopt(*NO_DELAY)
        for _ in range(count):
            started = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            sys.stdout.write(f"{time.perf_counter() - started}\n")


def push(nbytes: int) -> None:
    """Print the bits per second at which so many bytes arrived."""
    with socket.create_connection(("h0", PORT), timeout=PATIENCE_S) as connection:
        started = time.perf_counter()
        connection.sendall(b"x" * (nbytes - 1) + b"e")
        connection.recv(1)
        sys.stdout.write(f"{nbytes * 8 / (time.perf_counter() - started)}\n")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        {"ping": ping, "push": push}[sys.argv[1]](int(sys.argv[2]))
