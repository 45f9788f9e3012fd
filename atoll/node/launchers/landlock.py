"""Landlock of the Linux kernel: limits access to files, TCP ports and other processes.

A process restricts itself and its descendants, without privileges and for ever. What no rule allows
is refused with EACCES. See linux/landlock.h; needs Linux 5.13, 6.7 for TCP, 6.12 for signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from atoll import system

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH, _NET_PORT = 1, 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_AND_MAKE | _REFER | _TRUNCATE | _IOCTL_DEVICE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
"""Rights that a rule about something other than a folder may have."""

_BIND_TCP, _CONNECT_TCP = 0b01, 0b10
_TCP_SINCE = 4
"""Version of the kernel's interface in which TCP can be restricted to ports."""
_SIGNALS_AND_ABSTRACT_SOCKETS = 0b11
_SCOPES_SINCE = 6
"""Version of the kernel's interface in which a process can be kept from signalling others."""


def version() -> int:
    """Return the version of the kernel's interface; 0: there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def keeps_signals() -> bool:
    """Return whether restricted processes cannot signal others."""
    return version() >= _SCOPES_SINCE


def keeps_ports() -> bool:
    """Return whether TCP can be restricted to ports."""
    return version() >= _TCP_SINCE


class Landlock:
    """Rules that a child puts into force before its program starts."""

    def __init__(
        self, *, readable: Iterable[Path], writable: Iterable[Path], connect_to: int | None = None
    ) -> None:
        """Allow reading and running below some paths, everything below others.

        With `connect_to` TCP may connect to this port only, at any address, and listen nowhere.
        Paths that do not exist are left out. Raises OSError if the kernel refuses.
        """
        self._libc = _libc()
        self._give_up = system.giving_up_privileges()
        known = version()
        handled = (1 << min(16, {1: 13, 2: 14, 3: 15, 4: 15}.get(known, 16))) - 1
        scopes = _SIGNALS_AND_ABSTRACT_SOCKETS if known >= _SCOPES_SINCE else 0
        tcp = _BIND_TCP | _CONNECT_TCP if connect_to is not None else 0
        fields = struct.pack("=QQQ", handled, tcp, scopes)
        size = 8 if known < 4 else 16 if known < _SCOPES_SINCE else 24
        self._rules = self._call(_CREATE_RULESET, fields, size, 0)
        try:
            for paths, rights in ((readable, _READ), (writable, _WRITE)):
                for path in paths:
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        self._allow(path, rights & handled)
            if connect_to is not None:
                rule = struct.pack("=QQ", _CONNECT_TCP, connect_to)
                self._call(_ADD_RULE, self._rules, _NET_PORT, rule, 0)
        except BaseException:
            self.close()
            raise

    def _allow(self, path: Path, rights: int) -> None:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(opened).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights, opened)
            self._call(_ADD_RULE, self._rules, _PATH_BENEATH, rule, 0)
        finally:
            os.close(opened)

    def restrict(self) -> None:
        """Put the rules into force for this process, for ever; raises OSError.

        It also gives up all capabilities, with which root could still read other processes' memory.
        """
        self._give_up()
        self._call(_RESTRICT_SELF, self._rules, 0)

    def close(self) -> None:
        """Forget the rules; processes that have them keep them."""
        os.close(self._rules)

    def _call(self, number: int, *arguments: object) -> int:
        result = int(self._libc.syscall(number, *arguments))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"Landlock: {os.strerror(error)}")
        return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
