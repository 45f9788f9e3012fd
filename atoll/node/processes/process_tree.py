"""Process trees that end together, and children that see their parent end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable

import psutil

from atoll import system


def watch_parent(*, interval_s: float = 1.0) -> None:
    """End this process when its parent is gone, if the kernel does not do it."""
    if sys.platform.startswith("linux"):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, parents first; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_tree(processes: Iterable[psutil.Process], *, number: int) -> None:
    """Send a signal to every process that still lives."""
    for process in processes:
        try:
            process.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def wake(processes: Iterable[psutil.Process]) -> None:
    """Continue processes that were stopped (SIGSTOP), so that they react to other signals."""
    if hasattr(signal, "SIGCONT"):
        signal_tree(processes, number=signal.SIGCONT)


def started_at(pid: int) -> float | None:
    """Return a process's start time, which detects a reused process id; None: gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def await_end(processes: Iterable[psutil.Process], *, timeout_s: float) -> None:
    """Wait until processes have ended, children or not."""
    psutil.wait_procs(list(processes), timeout=timeout_s)


def reap(*, own: Collection[int]) -> None:
    """Reap orphans, which process 1 of a container inherits, except the children in `own`."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def group_mates() -> list[psutil.Process]:
    """Return the other processes of the group that this process leads, if it leads one.

    They include orphans, which are in no tree.
    """
    if system.group_of(0) != os.getpid():
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and system.group_of(process.pid) == os.getpid():
                found.append(process)
    return found
