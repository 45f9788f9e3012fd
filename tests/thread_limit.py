"""A process at the limit of its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TOO_LARGE_A_STACK = 2**47
"""Bytes: more than the address space of a process."""


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let every start of a thread fail as it does at the limit of processes."""
    before = threading.stack_size(TOO_LARGE_A_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)
