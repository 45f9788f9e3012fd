"""What a process tells of an error before it ends."""

from __future__ import annotations

import platform
import traceback

from atoll.errors import AtollError, ScriptError


def told_error(error: BaseException, *, member: str) -> AtollError:
    """Return the error that the hub is told when a script raised."""
    if isinstance(error, AtollError):
        return error
    lines = "".join(traceback.format_exception(error)[-6:]).strip()
    return ScriptError(
        f"the script raised {type(error).__name__}: {error}",
        given=f"member {member} on {platform.node()}: {lines}",
        remedy="see the job's log",
    )
