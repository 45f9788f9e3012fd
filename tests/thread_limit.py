"""A process at the limit of its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TOO_LARGE_A_STACK = 2**47
"""Bytes: more than the address space of a process."""


@contextmanager
def no_more_threads(name: str) -> Iterator[None]:
    """Let every start of a thread of this name fail as it does at the limit of processes.

    Others may still start: servers of earlier tests may be about to end.
    """
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name != name:
            return start(thread)
        before = threading.stack_size(TOO_LARGE_A_STACK)
        try:
            return start(thread)
        finally:
            threading.stack_size(before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield
