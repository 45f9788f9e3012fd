"""A network of its own for a program, in which its hub alone answers. Linux, without privileges.

The program's process gets new namespaces: its network has no device but loopback, where one port is
open, at the hub's own address. The process itself opens that port, and passes the listening socket
to the agent before the program starts; the agent forwards every connection to the hub. Names are
looked up in a file only, and folders with other programs' sockets (/run, /tmp) are empty. The agent
can accept on that socket from outside, so no helper has to be installed or run in the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from atoll import system
from atoll.net.accepting import accepted, serve_on_thread, stop_listening
from atoll.node.processes.files import replace_text

BACKLOG = 64
CONNECT_S = 10.0
"""Time limit of a connection to the hub."""
MOST_LINES = 256
"""Open connections of one program to its hub."""
BLOCK_BYTES = 1 << 18

_MOUNTS, _USERS, _NETWORK = 0x0002_0000, 0x1000_0000, 0x4000_0000
_BIND, _BIND_ALL, _PRIVATE_ALL, _NO_SUID_NO_DEVICES = 0x1000, 0x5000, 0x4_4000, 0x6
_GET_FLAGS, _SET_FLAGS, _SET_ADDRESS, _SET_MASK = 0x8913, 0x8914, 0x8916, 0x891C
_UP = 0x1
_HOSTS = "/etc/hosts"
_SOCKETS = ("/run", "/tmp", "/var/tmp")
"""Folders in which other programs may have sockets, e.g. of the session bus or an SSH agent: a
process that connects to them can make those programs act."""


class HubNetwork:
    """The network of one child, which enters it before its program starts; the agent serves it."""

    def __init__(self, host: str, port: int, *, folder: Path, needed: Sequence[Path] = ()) -> None:
        """Resolve the address of the hub (or of the proxy to it), and prepare.

        `folder` is the process's own; `needed` are other folders that it has to see.

        Raises:
            OSError: the name cannot be resolved, or the folder cannot be written.
        """
        self._host, self._port = host, port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._address = str(found[4][0])
        # Not after the fork, where another thread's import lock may be held for ever.
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ask_device = system.device_requests()
        self._hosts = folder / "hosts"
        names = sorted({host, platform.node()} - {self._address, ""})
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self._address if n == host else '127.0.0.1'} {n}" for n in names]
        replace_text(self._hosts, "\n".join(lines) + "\n")
        kept = {path.resolve() for path in (folder, *needed) if path.exists()}
        self._hidden = {
            Path(path): sorted(one for one in kept if one.is_relative_to(path))
            for path in _SOCKETS
            if Path(path).is_dir() and not Path(path).is_symlink()
        }
        self._near, self._far = socket.socketpair()

    # ----------------------------------------------------------------------- in the child

    def enter(self) -> None:
        """Move this process into its own network; raises OSError if the kernel refuses."""
        user, group = system.user_ids() or (0, 0)
        self._check(self._libc.unshare(_USERS | _NETWORK | _MOUNTS), "namespaces")
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            (system.OWN_PROCESS / name).write_bytes(text.encode())
        self._mount(None, "/", None, _PRIVATE_ALL, None)
        self._mount(str(self._hosts), _HOSTS, None, _BIND, None)
        folder = os.getcwd()
        for path, kept in self._hidden.items():
            self._hide(path, kept)
        os.chdir(folder)  # of the new mounts
        self._open_loopback()
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        address = (self._address, self._port)
        with socket.create_server(address, family=family, backlog=BACKLOG) as listener:
            socket.send_fds(self._far, [b"x"], [listener.fileno()])

    def _hide(self, folder: Path, kept: Sequence[Path]) -> None:
        """Put an empty folder in place of this one, with some of its contents."""
        opened = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in kept]
        self._mount("tmpfs", str(folder), "tmpfs", _NO_SUID_NO_DEVICES, "size=1m,mode=755")
        for path, number in zip(kept, opened, strict=True):
            if not path.exists():  # it is not below another one
                if stat.S_ISDIR(os.fstat(number).st_mode):
                    path.mkdir(parents=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
                opened_folder = str(system.OWN_PROCESS / f"fd/{number}")
                self._mount(opened_folder, str(path), None, _BIND_ALL, None)
            os.close(number)

    def _open_loopback(self) -> None:
        """Set the only device up, with the hub's address."""
        request = self._ask_device
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            flags = request(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
            (before,) = struct.unpack_from("h", flags, 16)
            request(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", before | _UP))
            if ":" not in self._address and not self._address.startswith("127."):
                for setting, value in (
                    (_SET_ADDRESS, self._address), (_SET_MASK, "255.255.255.255")
                ):  # fmt: skip
                    raw = struct.pack(
                        "16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(value)
                    )
                    request(any_socket, setting, raw)
        if ":" in self._address and self._address != "::1":
            raw = socket.inet_pton(socket.AF_INET6, self._address.partition("%")[0])
            index = socket.if_nametoindex("lo")
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as any_socket:
                request(any_socket, _SET_ADDRESS, struct.pack("16sIi", raw, 128, index))

    def _mount(
        self, what: str | None, where: str, kind: str | None, flags: int, options: str | None
    ) -> None:
        words = [None if word is None else word.encode() for word in (what, where, kind, options)]
        done = self._libc.mount(*words[:3], ctypes.c_ulong(flags), words[3])
        self._check(done, f"mount {where}")

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result:
            error = ctypes.get_errno()
            raise OSError(error, f"{what}: {os.strerror(error)}")

    # ----------------------------------------------------------------------- in the agent

    def serve(self) -> HubForwarder:
        """Forward the connections of the child to the hub; raises OSError if it has not started."""
        with self._near:
            self._far.close()
            _, sockets, _, _ = socket.recv_fds(self._near, 1, 1)
        if not sockets:
            raise ConnectionAbortedError("the process did not open its way to the hub")
        return HubForwarder(socket.socket(fileno=sockets[0]), self._host, self._port)

    def close(self) -> None:
        """Forget a child that did not start."""
        self._near.close()
        self._far.close()


class HubForwarder:
    """Forwards connections from one program's network to its hub."""

    def __init__(self, listener: socket.socket, host: str, port: int) -> None:
        """Take over a listening socket, and serve it on threads until `close`."""
        self._listener, self._place = listener, (host, port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="hub-forwarder", daemon=True).start()

    def close(self) -> None:
        """Cut all connections."""
        stop_listening(self._listener, self._closed)
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        for near, _ in accepted(self._listener, self._closed):
            with self._lock:
                full = self._closed.is_set() or len(self._open) >= 2 * MOST_LINES
                if not full:
                    self._open.add(near)
            if full:
                near.close()
                continue
            forget = partial(self._forget, [near])
            serve_on_thread(near, self._join, name="hub-line", refused=forget)

    def _forget(self, ends: Sequence[socket.socket]) -> None:
        with self._lock:
            self._open.difference_update(ends)

    def _join(self, near: socket.socket) -> None:
        ends = [near]
        try:
            with contextlib.suppress(OSError):
                far = socket.create_connection(self._place, timeout=CONNECT_S)
                far.settimeout(None)
                ends.append(far)
                with self._lock:
                    self._open.add(far)
                    if self._closed.is_set():
                        return
                for end in ends:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
                back.start()
                _pass_on(near, far)
                back.join()
        finally:
            self._forget(ends)
            for end in ends:
                end.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copy `source` to `target` until its end, then shut this direction down on both."""
    block = memoryview(bytearray(BLOCK_BYTES))
    with contextlib.suppress(OSError):
        while nbytes := source.recv_into(block):
            target.sendall(block[:nbytes])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RD)


def is_possible(folder: Path) -> bool:
    """Return whether this system lets a process have such a network; tries it."""
    if sys.platform != "linux":
        return False
    try:
        network = HubNetwork("127.0.0.1", 9, folder=folder)
    except OSError:
        return False
    try:
        done = subprocess.run(["true"], cwd=folder, preexec_fn=network.enter, check=False)
        return done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        network.close()
