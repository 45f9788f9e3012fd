"""Atoll's errors for exceptions of a user's script or of a library."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from atoll.errors import AtollError, OutOfMemory, ScriptError


def describe(error: BaseException, *, where: str, trace: TracebackType | None = None) -> AtollError:
    """Return the error for an exception of a library or of a user's script.

    `where` is its source, e.g. the script's name, `trace` the traceback from the script's first
    frame. Which machine it was is known to the hub.
    """
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if is_out_of_memory(error):
        return OutOfMemory(
            f"{where} ran out of memory",
            given=text.splitlines()[0],
            expected="a model and batch that fit",
            remedy="make batch or the model smaller, or run fewer workers on this machine",
        )
    frames = traceback.extract_tb(trace or error.__traceback__)
    line = f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return ScriptError(
        f"{where} raised {text}",
        given=line or None,
        remedy="correct it and run it again (a resumed job keeps its old files); "
        "the whole output: atoll logs",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, in Python or in one of torch's allocators."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
