"""What depends on the operating system and several rooms need: signals, locks, children, folders.

Elsewhere Linux, macOS and Windows are told apart only where a room alone has something to do with
one of them. Loads neither psutil nor, where it is not there, any module of POSIX.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

KILL = signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL
"""The signal that cannot be ignored (on Windows the only one)."""

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

# ----------------------------------------------------------------------------------- processes


def die_with_parent() -> Callable[[], None] | None:
    """Return the function that a child runs before its program so that it dies with its parent.

    Linux only (PR_SET_PDEATHSIG); elsewhere None: `process_tree.watch_parent` inside a child of a
    node does the same within a second. The parent is the *thread* that starts the child, so that
    thread must live as long as the child may.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # not after the fork, where loading is unsafe
    parent = os.getpid()

    def before_program() -> None:
        prctl(_PR_SET_PDEATHSIG, KILL)
        if os.getppid() != parent:  # it died between the fork and prctl
            os._exit(1)

    return before_program


def end_with_parent() -> None:
    """Let this process, which runs already, die with its parent; Linux only."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(KILL))


def kill_group(pid: int) -> None:
    """Kill the process group led by `pid`; Windows has no groups."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(pid, KILL)
        except (ProcessLookupError, PermissionError):
            return


# --------------------------------------------------------------------------------------- users


def user_ids() -> tuple[int, int] | None:
    """Return the effective user and group of this process as numbers; None: it has none."""
    return (os.geteuid(), os.getegid()) if hasattr(os, "geteuid") else None


def has_user(name: str) -> bool:
    """Return whether this machine has a user; not to be called where users have no numbers."""
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def give_to(user: str, *paths: Path) -> None:
    """Change the owner of files, where a number is all that an owner is."""
    if hasattr(os, "chown"):
        for path in paths:
            shutil.chown(path, user)


# --------------------------------------------------------------------------------------- files


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable, if the system can.

    Windows opens no folders; there the rename itself is written through.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        if os.name == "posix":
            raise
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


LOCKS_WAIT = sys.platform != "win32"
"""Whether `lock_waiting` waits for other processes."""

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int, *, shared: bool) -> None:
        """Lock an open file, or raise OSError if another process has locked it.

        Windows has no shared locks: there they always succeed, and files in use cannot be deleted.
        """
        if not shared:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

    def lock_waiting(handle: int) -> None:
        """Wait for the lock of an open file; not to be called unless `LOCKS_WAIT`."""

    def unlock(handle: int) -> None:
        """Release a lock of `lock_waiting`."""

else:
    import fcntl

    def try_lock(handle: int, *, shared: bool) -> None:
        """Lock an open file, or raise OSError if another process has locked it."""
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def lock_waiting(handle: int) -> None:
        """Wait for the lock of an open file; not to be called unless `LOCKS_WAIT`."""
        fcntl.flock(handle, fcntl.LOCK_EX)

    def unlock(handle: int) -> None:
        """Release a lock of `lock_waiting`."""
        fcntl.flock(handle, fcntl.LOCK_UN)
