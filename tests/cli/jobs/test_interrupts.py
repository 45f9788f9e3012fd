"""Signals as a flag."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from atoll.cli.jobs.interrupts import Interrupts, RememberedInterrupt
from atoll.cli.main import app, main
from tests.patience import PROMPT_S


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """What other packages have left behind in this process is no matter here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_signal_sets_the_flag_ends_waits_and_raises_nothing() -> None:
    calls: list[int] = []
    with Interrupts(on_first=lambda: calls.append(1)) as interrupts:
        assert not interrupts
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts
        assert interrupts.count == 2
    assert calls == [1], "the second signal is only counted"


def reached(line: int) -> bool:
    """Let a signal come at this line of a wait; return whether the wait has so many lines."""
    interrupts, passed = Interrupts(), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal passed
        if event == "line":
            passed += 1
            if passed == line:
                interrupts._handle(signal.SIGINT, frame)  # in the midst of it, as a signal does
        return trace

    def wait() -> None:
        sys.settrace(trace)
        interrupts.sleep(0.01)
        sys.settrace(None)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(PROMPT_S)
    assert not waiting.is_alive(), f"it hangs: a signal at line {line} of a wait"
    assert bool(interrupts) is (passed >= line)
    return passed >= line


def test_signal_in_the_midst_of_a_wait_hangs_nothing() -> None:
    """Handlers run between any two steps of the main thread, while it holds a lock too."""
    line = 1
    while reached(line):
        line += 1
    assert line > 10


def test_swallowed_interrupt_is_not_forgotten() -> None:
    with RememberedInterrupt():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        calls: list[int] = []
        with Interrupts(on_first=lambda: calls.append(1)) as interrupts:
            assert interrupts
        assert calls == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_slow_verbs_notice_interrupts_from_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        remembers = "RememberedInterrupt" in command.callback.__code__.co_names
        assert remembers is (
            command.name in ("up", "demo", "run", "resume", "tune", "watch", "rehearse")
        ), command.name
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--local" in capsys.readouterr().out


def test_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_until_ends_with_the_condition_or_at_its_time() -> None:
    with Interrupts() as interrupts:
        assert interrupts.until(lambda: True, timeout_s=5, every_s=0.01)
        begun = time.monotonic()
        assert not interrupts.until(lambda: False, timeout_s=0.05, every_s=0.01)
        assert time.monotonic() - begun < PROMPT_S
