"""Where a lab keeps things on this machine, and the removal of all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from atoll.netlab.commands import LabError, ip

RUN = Path("/run/atoll-lab")
NAMESPACES = Path("/run/netns")
HOST_FILES = Path("/etc/netns")
"""`ip netns exec` shows the files below it as /etc inside the namespace of that name."""

END_TIMEOUT_S = 5.0


def folder_of(name: str) -> Path:
    """Return the folder of a lab: its socket, its settings, the log of its switch."""
    return RUN / name


def switch_namespace(name: str) -> str:
    """Return the namespace that the switch lives in."""
    return f"atoll-{name}-switch"


def host_namespace(name: str, host: int) -> str:
    """Return the namespace of a host."""
    return f"atoll-{name}-h{host}"


def namespaces_of(name: str) -> list[str]:
    """Return every namespace that exists of a lab."""
    return sorted(path.name for path in NAMESPACES.glob(f"atoll-{name}-*"))


def all_labs() -> list[str]:
    """Return the names of all labs that left anything on this machine."""
    names = {path.name for path in RUN.glob("*")}
    for folder in (NAMESPACES, HOST_FILES):
        names |= {path.name.split("-")[1] for path in folder.glob("atoll-*-*")}
    return sorted(names)


def remove(name: str) -> None:
    """End every process of a lab and remove what it left; of a lab that is none, nothing.

    Raises:
        LabError: something would not go.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if _end_processes(name, sent):
            break
    for namespace in namespaces_of(name):
        ip("netns", "delete", namespace, check=False)
    for path in (*HOST_FILES.glob(f"atoll-{name}-*"), folder_of(name)):
        shutil.rmtree(path, ignore_errors=True)
    if left := namespaces_of(name):
        raise LabError("a lab could not be removed", given=", ".join(left))


def _end_processes(name: str, sent: signal.Signals) -> bool:
    """Signal every process inside; return whether all are gone within a while."""
    deadline = time.monotonic() + END_TIMEOUT_S / (5 if sent == signal.SIGTERM else 1)
    for process in processes_of(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, sent)
    while processes_of(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def processes_of(name: str) -> list[int]:
    """Return the processes inside a lab that are alive, without this one."""
    found: list[int] = []
    for namespace in namespaces_of(name):
        listed = ip("netns", "pids", namespace, check=False).split()
        found += [int(text) for text in listed if text.isdigit()]
    return [process for process in found if process != os.getpid() and _alive(process)]


def _alive(process: int) -> bool:
    """Return whether a process runs still; a zombie does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
