"""Calls of `ip`, and what to say when one fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

from atoll.errors import AtollError

TIMEOUT_S = 30.0


class LabError(AtollError):
    """The network lab cannot do what was requested on this machine."""


def ip(*arguments: str, namespace: str = "", check: bool = True) -> str:
    """Run `ip` with these arguments and return what it printed.

    Args:
        arguments: As on a command line.
        namespace: Where it acts; empty: here.
        check: Raise when it fails; otherwise a failure returns what it printed.

    Raises:
        LabError: it failed; says why.
    """
    command = ["ip", *(("-n", namespace) if namespace else ()), *arguments]
    return _run(command, check=check)


def ip_batch(lines: Iterable[str], *, namespace: str) -> None:
    """Run several `ip` commands inside a namespace with one process."""
    _run(["ip", "-n", namespace, "-batch", "-"], text="\n".join(lines) + "\n")


def shell(namespace: str, script: str) -> None:
    """Run a line of shell inside a namespace."""
    _run(["ip", "netns", "exec", namespace, "sh", "-c", script])


def _run(command: list[str], *, check: bool = True, text: str = "") -> str:
    if shutil.which(command[0]) is None:
        raise LabError(
            f"the program {command[0]} is missing",
            expected="iproute2",
            remedy="install it, e.g. `apt-get install iproute2`",
        )
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(
            "a command of the network lab does not end",
            given=f"{' '.join(command)}: killed after {TIMEOUT_S:g} s",
        ) from error
    if check and done.returncode:
        raise LabError(
            "a command of the network lab failed",
            given=f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}",
            remedy="network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN)",
        )
    return done.stdout
