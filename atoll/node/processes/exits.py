"""What the exit status of a process means, in words for the person who waits for it."""

from __future__ import annotations

import signal
from pathlib import Path

from atoll.errors import AtollError, JobError, OutOfMemory, ScriptError

ERROR_FILE = "error.json"
"""Where a worker leaves its error, in case the hub could not be told."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
"""Signals by which a program ends of its own fault."""


def explain_exit(code: int, *, member: str, oom_kills: int, program: str = "") -> AtollError:
    """Return the error that an exit status stands for.

    Args:
        code: As of `subprocess`: negative for a signal.
        member: Whose process it was.
        oom_kills: How many processes the kernel killed for want of memory meanwhile.
        program: The job's own program, whose failures are its own; empty: a worker of ours.
    """
    if program and (code > 0 or _signal_name(-code) in _CRASHES):
        ended = f"exit status {code}" if code > 0 else f"signal {-code} ({_signal_name(-code)})"
        return ScriptError(
            f"{program} ended with {ended}",
            given=member,
            expected="exit status 0",
            remedy="see its last lines: atoll logs",
        )
    if code == -signal.SIGKILL and oom_kills > 0:
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


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
