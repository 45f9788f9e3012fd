"""Exit statuses in words."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from atoll.errors import JobError, OutOfMemory
from atoll.node.processes.exits import explain_exit, read_error


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


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", None), ("[]", None), ("[" * 20_000, None), ('{"what": 3, "kind": []}', "3"),
        ('{"what": "a\\udc80"}', "a?"),
    ],
)  # fmt: skip
def test_stored_error_may_be_malformed(tmp_path: Path, text: str, what: str | None) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    error = read_error(path)
    assert (error.what if error is not None else None) == what
