"""Exit statuses in words."""

from __future__ import annotations

import signal

import pytest

from atoll.errors import JobError, OutOfMemory
from atoll.node.processes.exits import explain_exit


def test_kill_by_the_kernel_for_want_of_memory_is_out_of_memory() -> None:
    error = explain_exit(-signal.SIGKILL, member="w1", oom_kills=1)
    assert isinstance(error, OutOfMemory)
    assert "w1" in error.what


def test_kill_by_somebody_is_not_out_of_memory() -> None:
    error = explain_exit(-signal.SIGKILL, member="w1", oom_kills=0)
    assert type(error) is JobError
    assert "SIGKILL" in str(error)


@pytest.mark.parametrize(
    ("code", "words"), [(-signal.SIGSEGV, "SIGSEGV"), (3, "exit status 3"), (-90, "signal 90")]
)
def test_every_other_end_is_named(code: int, words: str) -> None:
    assert words in str(explain_exit(code, member="w0", oom_kills=5))
