"""The process of a lab's switch: `python -m atoll.netlab.daemon`, started by `Lab` as root.

It owns the TAP devices of all hosts, moves packets as the `Switch` says, and answers requests of
one JSON line each on a Unix socket. When it is guarded (its standard input is a pipe from its
owner) it removes the whole lab as soon as the owner is gone, however that came about.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from atoll.netlab import registry
from atoll.netlab.shape import Between, Shape
from atoll.netlab.switch import Switch
from atoll.netlab.tap import LARGEST_PACKET_BYTES, open_tap

READ_AT_ONCE = 32
"""Packets taken from one host before the others have their turn."""

SOCKET = "switch.sock"
READY = "ready"


class Daemon:
    """The loop around one switch."""

    def __init__(self, switch: Switch, taps: list[int], requests: socket.socket) -> None:
        self._switch = switch
        self._taps = taps
        self._host_of = {tap: host for host, tap in enumerate(taps)}
        self._requests = requests

    def run(self, *, guard: int | None) -> None:
        """Move packets until a request to stop, or until the guard's other end is closed."""
        watched = [*self._taps, self._requests.fileno(), *([guard] if guard is not None else [])]
        while True:
            for host, packet in self._switch.deliveries(time.monotonic()):
                with contextlib.suppress(OSError):  # no room in the host: dropped there
                    os.write(self._taps[host], packet)
            due = self._switch.next_due()
            timeout_s = None if due is None else max(0.0, due - time.monotonic())
            ready, _, _ = select.select(watched, (), (), timeout_s)
            for descriptor in ready:
                if descriptor in self._host_of:
                    self._read(descriptor)
                elif descriptor == guard:
                    return
                else:
                    self._answer()

    def _read(self, tap: int) -> None:
        """Take what a host has sent."""
        host, now = self._host_of[tap], time.monotonic()
        with contextlib.suppress(OSError):
            for _ in range(READ_AT_ONCE):
                self._switch.arrive(host, os.read(tap, LARGEST_PACKET_BYTES), now)

    def _answer(self) -> None:
        """Serve one request; a client that misbehaves is dropped."""
        connection, _ = self._requests.accept()
        mistakes = (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError)
        with connection, contextlib.suppress(*mistakes):
            connection.settimeout(0.5)
            with connection.makefile("rw", encoding="utf-8") as stream:
                answer = self._do(json.loads(stream.readline()))
                stream.write(json.dumps(answer) + "\n")

    def _do(self, request: dict[str, Any]) -> Any:
        host = request.get("host", 0)
        if request["do"] == "shape":
            self._switch.set_shape(host, Shape(**request["shape"]))
        elif request["do"] == "between":
            self._switch.set_between(host, request["to"], Between(**request["between"]))
        elif request["do"] == "cut":
            self._switch.set_cut(host, cut=bool(request["cut"]))
        return self._switch.stats()


def main(arguments: list[str]) -> int:
    """Open the devices, say that they are there, and serve."""
    parser = argparse.ArgumentParser(prog="python -m atoll.netlab.daemon", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the lab")
    parser.add_argument("--shapes", required=True, help="JSON list, one object per host")
    parser.add_argument("--guarded", action="store_true", help="standard input is the owner's pipe")
    options = parser.parse_args(arguments)
    shapes = [Shape(**fields) for fields in json.loads(options.shapes)]
    _hurry()
    taps = [open_tap(f"t{host}") for host in range(len(shapes))]
    requests = _listen(registry.folder_of(options.name) / SOCKET)
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    Daemon(Switch(shapes), taps, requests).run(guard=0 if options.guarded else None)
    registry.remove(options.name)
    return 0


def _hurry() -> None:
    """Ask for real-time priority, so that delays hold while the processor is busy."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _listen(path: Path) -> socket.socket:
    requests = socket.socket(socket.AF_UNIX)
    requests.bind(str(path))
    requests.listen(16)
    return requests


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
