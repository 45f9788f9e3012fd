"""Signals as a flag."""

from __future__ import annotations

import os
import signal
import time

from atoll.cli.interrupts import Interrupts


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
        assert time.monotonic() - begun < 5
