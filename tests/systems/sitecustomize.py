"""Makes this process pretend another system to Atoll's own code; other libraries see the real one.

`PRETENDED_SYSTEM` is `win32` or `darwin`. Atoll's modules get `os`, `sys`, `signal` and
`subprocess` without what that system lacks, no module that it lacks, and no /proc. On `win32` a
`msvcrt` is lent. Python loads this file at its start from a folder in PYTHONPATH; each process
appends its command to the file `PRETENDED_LOG`.
"""

import builtins
import os
import signal
import subprocess
import sys
import types
from typing import Any

SYSTEM = os.environ.get("PRETENDED_SYSTEM", "")

NO_MODULES = {
    "win32": {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"},
    "darwin": set(),
}
EVERYWHERE = {
    "memfd_create", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity",
    "setns", "unshare", "splice", "copy_file_range", "eventfd", "pidfd_open", "O_PATH",
}  # fmt: skip
"""Of `os`; macOS has none of them either."""
NO_NAMES = {
    ("os", "darwin"): EVERYWHERE,
    ("os", "win32"): EVERYWHERE
    | {
        "chown", "fchmod", "fchown", "fork", "forkpty", "geteuid", "getegid", "getgid", "getgroups",
        "getloadavg", "getpgid", "getpgrp", "getsid", "getuid", "initgroups", "killpg", "lchown",
        "mkfifo", "nice", "openpty", "pread", "pwrite", "setgid", "setpgid", "setsid", "setuid",
        "statvfs", "sysconf", "uname", "wait", "wait3", "wait4", "waitid", "O_CLOEXEC",
        "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "WNOHANG", "WIFEXITED",
    },
    ("signal", "darwin"): set(),
    ("signal", "win32"): {
        "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP",
        "SIGTSTP", "SIGUSR1", "SIGUSR2", "alarm", "pause", "pthread_kill", "pthread_sigmask",
        "setitimer", "sigwait", "siginterrupt",
    },
    ("socket", "win32"): {"AF_UNIX", "socketpair", "SO_REUSEPORT"},
}  # fmt: skip


class Pretended(types.ModuleType):
    """A module of which some names are missing, or others."""

    def __init__(self, real: types.ModuleType, missing: set[str], others: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(others)
        self._real, self._missing = real, missing

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"{self._real.__name__}.{name} is missing on {SYSTEM}")
        return getattr(self._real, name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._real) if name not in self._missing]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Refuses what Python refuses on Windows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("preexec_fn") is not None:
            raise ValueError("preexec_fn is not supported on Windows platforms")
        if options.get("pass_fds"):
            raise ValueError("pass_fds not supported on Windows.")
        options.pop("creationflags", None)
        super().__init__(*arguments, **options)


def lent_msvcrt() -> types.ModuleType:
    """Return the locks of Windows, made of those of POSIX."""
    import fcntl

    def locking(handle: int, mode: int, nbytes: int) -> None:
        fcntl.lockf(handle, mode, nbytes)

    made = types.ModuleType("msvcrt")
    made.__dict__.update(
        locking=locking, LK_LOCK=fcntl.LOCK_EX, LK_NBLCK=fcntl.LOCK_EX | fcntl.LOCK_NB,
        LK_UNLCK=fcntl.LOCK_UN,
    )  # fmt: skip
    return made


def pretend() -> None:
    """Change what Atoll's modules import, and what they may open."""
    windows = SYSTEM == "win32"
    lent: dict[str, types.ModuleType] = {"msvcrt": lent_msvcrt()} if windows else {}
    lent["sys"] = Pretended(sys, set(), {"platform": SYSTEM})
    for name, real in (("os", os), ("signal", signal)):
        others = {"name": "nt"} if windows and name == "os" else {}
        lent[name] = Pretended(real, NO_NAMES[name, SYSTEM], others)
    if windows:
        flags = {"CREATE_NEW_PROCESS_GROUP": 0x200, "CREATE_NO_WINDOW": 0x8000000, "Popen": Popen}
        flags["BELOW_NORMAL_PRIORITY_CLASS"] = 0x4000
        lent["subprocess"] = Pretended(subprocess, set(), flags)
    real_import = builtins.__import__

    def import_(name: str, scope: Any = None, *rest: Any, **more: Any) -> Any:
        package = str((scope or {}).get("__package__") or (scope or {}).get("__name__") or "")
        if package.partition(".")[0] == "atoll":
            if name in NO_MODULES[SYSTEM]:
                raise ModuleNotFoundError(f"{name} is missing on {SYSTEM}", name=name)
            if name in lent:
                return lent[name]
        return real_import(name, scope, *rest, **more)

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).startswith(("/proc/", "/sys/")):
            return
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and "/lib/python" in frame.f_code.co_filename:
            if "/site-packages/" in frame.f_code.co_filename:
                return  # another library's own business
            frame = frame.f_back
        if frame is not None and "/atoll/" in frame.f_code.co_filename:
            raise FileNotFoundError(2, f"there is no such file on {SYSTEM}", str(arguments[0]))

    builtins.__import__ = import_  # type: ignore[assignment]
    sys.addaudithook(opened)
    with open(os.environ["PRETENDED_LOG"], "a", encoding="utf-8") as log:
        print(*sys.orig_argv, file=log)


if SYSTEM:
    pretend()
