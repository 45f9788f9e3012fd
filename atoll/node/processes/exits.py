"""Errors that explain the exit status of a process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from atoll import system
from atoll.errors import AtollError, JobError, OutOfMemory, ScriptError, from_dict
from atoll.node.processes.files import read_bounded

ERROR_FILE = "error.json"
"""File in which a worker stores its error, in case it could not report it to the hub."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
"""Signals caused by a fault of the program itself."""


def read_error(path: Path) -> AtollError | None:
    """Return the error that a program has stored; None if there is none, or it is malformed."""
    try:
        fields = json.loads(read_bounded(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    # Reports to the hub are UTF-8, which has no surrogates.
    plain = {name: str(value).encode("utf-8", "replace").decode() for name, value in fields.items()}
    return from_dict(plain)


def explain_exit(code: int, *, member: str, oom_kills: int, program: str = "") -> AtollError:
    """Return the error for an exit status, as in `subprocess` (negative for a signal).

    `oom_kills` counts processes that the kernel killed for lack of memory meanwhile. `program` is
    the job's own program, responsible for its failures; empty for a worker of Atoll.
    """
    if program and (code > 0 or _signal_name(-code) in _CRASHES):
        ended = f"exit status {code}" if code > 0 else f"signal {-code} ({_signal_name(-code)})"
        return ScriptError(
            f"{program} ended with {ended}",
            given=member,
            expected="exit status 0",
            remedy="see its last lines: atoll logs",
        )
    if code == -system.KILL and oom_kills > 0:
        return OutOfMemory(
            f"{member} ran out of memory",
            given="the system killed it",
            expected="a model and batch that fit",
            remedy="make batch or the model smaller, or run fewer workers on this machine",
        )
    if code < 0:
        return JobError(
            f"{member} was killed",
            given=f"signal {-code} ({_signal_name(-code)})",
            remedy="see its last lines: atoll logs",
        )
    return JobError(
        f"{member} ended with exit status {code}",
        expected="0",
        remedy="see its last lines: atoll logs",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
