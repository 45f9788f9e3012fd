"""What depends on the operating system: signals, children, limits, users, locks, folders.

Elsewhere Linux, macOS and Windows are distinguished only by what all of them have. Does not load
psutil, nor, where it is not there, any module of POSIX.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

KILL = signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL
"""The signal that cannot be ignored (on Windows the only one)."""

UNSENT_OPTION: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
"""Option of a TCP socket: bytes that the kernel keeps unsent; None: this system has none."""

INTERRUPTS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
"""Signals of a person or a terminal that ask a program to end."""

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38  # from <linux/prctl.h>
_CAPABILITIES = 64
_NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)
"""Arguments of capset(2): its third version, for this process; no sets."""

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def congestion_control() -> str:
    """Return TCP's congestion control of this machine, e.g. `cubic`; empty: not known."""
    try:
        return CONGESTION.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# -------------------------------------------------------------------------------------- memory


def release_memory() -> bool:
    """Return freed memory of this process to the system; False: there was none to return.

    glibc only (malloc_trim); others return memory by themselves, or keep it.
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


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


class Apart(TypedDict):
    """Options of `subprocess.Popen` of a child in a process group of its own."""

    start_new_session: bool
    creationflags: int


def apart() -> Apart:
    """Return the options by which Ctrl+C in a console does not reach a child.

    On POSIX it leads a session and a group. On Windows it leads a group, and opens no window if
    this process has none.
    """
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        return {"start_new_session": False, "creationflags": flags}
    return {"start_new_session": True, "creationflags": 0}


def giving_up_privileges() -> Callable[[], None]:
    """Return the function by which a child loses all capabilities, and never gets any, on Linux.

    It raises OSError if the kernel refuses.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)  # not after the fork, where loading is unsafe

    def give_up() -> None:
        for capability in range(_CAPABILITIES):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        libc.capset(*_NO_CAPABILITIES)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs")

    return give_up


def before_program(
    *, niceness: int = 0, cpus: Sequence[int] = (), oom_score: int = 0
) -> Callable[[], None] | None:
    """Return what a child runs before its program: it dies with its parent, and has limits.

    Its descendants inherit the limits. What a system lacks is left out; Windows has none of it.

    Args:
        niceness: Added to that of this process.
        cpus: Numbers of the cores it may run on; empty: all.
        oom_score: How likely the kernel kills it when memory runs out, 0 to 1000.
    """
    if os.name != "posix":
        return None
    die = die_with_parent()

    def before() -> None:
        if die is not None:
            die()
        if oom_score:
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
                file.write(str(oom_score).encode())
        if niceness:
            os.nice(niceness)
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)

    return before


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, on systems with `nice`."""
    if hasattr(os, "nice"):
        os.nice(niceness)


def group_of(pid: int) -> int:
    """Return the number of a process's group, that of its leader; 0: Windows has no groups."""
    return os.getpgid(pid) if hasattr(os, "getpgid") else 0


def kill_group(pid: int) -> None:
    """Kill the process group led by `pid`; Windows has no groups."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(pid, KILL)
        except (ProcessLookupError, PermissionError):
            return


# -------------------------------------------------------------------------- limits and memory


def allow_many_files(wanted: int) -> None:
    """Raise the limit on the open files of this process; Windows has none."""
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def usable_cpus() -> list[int]:
    """Return the numbers of the cores that this process may run on, e.g. in a container."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None: only psutil knows it, which is large."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def proportional_bytes(pid: int) -> int | None:
    """Return a process's memory with shared pages divided among their users; None: not known."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def count_oom_kills(groups: str | None = None, *, root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory; 0: not known.

    Counts those of this process's control group, so that a container or another user's program
    that is killed does not look like ours; of the whole machine where the group has no count.

    Args:
        groups: Control groups, as `control_group` returns them; those of this process if None.
        root: Where `proc` and `sys` are mounted.
    """
    for path in _oom_counts(control_group(os.getpid()) if groups is None else groups):
        with contextlib.suppress(OSError):
            lines = (root / path).read_bytes().splitlines()
            counts = [int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")]
            if counts:
                return counts[0]
    return 0


def _oom_counts(groups: str) -> Iterator[str]:
    """Yield the files that may count kills, nearest first: cgroup v1 and v2, then the machine."""
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, name = "sys/fs/cgroup/memory", "memory.oom_control"
        elif not controllers:
            mount, name = "sys/fs/cgroup", "memory.events.local"
        else:
            continue
        yield f"{mount}{group.rstrip('/')}/{name}"
        yield f"{mount}/{name}"  # in a container its own group is mounted there
    yield "proc/vmstat"


def control_group(pid: int) -> str:
    """Return the control groups of a process, as the kernel writes them; empty: not known."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def try_local_socket(path: str) -> None:
    """Raise OSError if no program listens on a local socket, or there are none on this system."""
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no local sockets")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


# ------------------------------------------------------------------------------------- network

OWN_PROCESS = Path("/proc/self")
"""What Linux reports to a process about itself."""


def device_requests() -> Callable[[socket.socket, int, bytes], bytes]:
    """Return the function (ioctl) that queries a network device through a socket; Linux only."""
    import fcntl

    return lambda opened, request, argument: fcntl.ioctl(opened, request, argument)


# --------------------------------------------------------------------------------------- users


def user_ids() -> tuple[int, int] | None:
    """Return the effective user and group of this process as numbers; None on Windows."""
    return (os.geteuid(), os.getegid()) if hasattr(os, "geteuid") else None


def has_user(name: str) -> bool:
    """Return whether this machine has a user; not to be called on Windows."""
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def give_to(user: str, *paths: Path) -> None:
    """Change the owner of files, on systems with `chown`."""
    if hasattr(os, "chown"):
        for path in paths:
            shutil.chown(path, user)


# --------------------------------------------------------------------------------------- files


FILES_HAVE_MODES = os.name == "posix"
"""Whether files say who may read, write and execute them."""


def is_full(folder: Path) -> bool:
    """Return whether the disk of a folder has less than 256 KiB free."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free < 256 * 1024


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
