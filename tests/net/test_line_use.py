"""Uploads give way to what others wait for, and get through all the same."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from atoll.net.line_use import EXCHANGE_S, FIRST_S, SHARE, GiveWay, LineUse


class Time:
    """A clock that runs only with what is waited for."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return 1_000_000.0 + self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


def waited_s(path: Path) -> float:
    """Return the seconds for which one block waits at the beginning of time."""
    clock = Time()
    GiveWay(str(path), sleep=clock.sleep, monotonic=clock.monotonic).wait()
    return clock.passed


def test_uploads_wait_until_the_last_exchange_has_ended(tmp_path: Path) -> None:
    line = LineUse(tmp_path / "line", monotonic=Time().monotonic)
    assert waited_s(tmp_path / "line") == 0.0
    with line.exchange():
        with line.exchange():
            assert waited_s(tmp_path / "line") > 1.0
        assert waited_s(tmp_path / "line") > 1.0
    assert waited_s(tmp_path / "line") == 0.0
    line.close()


def test_uploads_wait_while_a_state_is_sent(tmp_path: Path) -> None:
    line = LineUse(tmp_path / "line", monotonic=Time().monotonic)
    line.serve(3.0)
    with line.exchange():
        pass
    assert 1.0 < waited_s(tmp_path / "line") <= 3.1
    line.close()
    assert waited_s(tmp_path / "line") == 0.0


def test_where_members_always_exchange_an_upload_gets_its_share(tmp_path: Path) -> None:
    clock = Time()
    line = LineUse(tmp_path / "line", monotonic=clock.monotonic)
    way = GiveWay(str(tmp_path / "line"), sleep=clock.sleep, monotonic=clock.monotonic)
    blocks = 0
    while clock.passed < 1000.0:
        with line.exchange():
            way.wait()
        clock.passed += 0.1  # a block is sent
        blocks += 1
    assert 0.1 * blocks >= (1 - SHARE) * 1000.0 - FIRST_S - 1.0
    line.close()


def test_an_exchange_that_hangs_holds_up_no_upload(tmp_path: Path) -> None:
    clock = Time()
    line = LineUse(tmp_path / "line", monotonic=clock.monotonic)
    way = GiveWay(str(tmp_path / "line"), sleep=clock.sleep, monotonic=clock.monotonic)
    with line.exchange():
        clock.passed = EXCHANGE_S + 1.0
        before = clock.passed
        way.wait()
    assert clock.passed == before
    line.close()


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_file_without_a_number_is_no_reason_to_wait(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "line").write_bytes(content)
    assert waited_s(tmp_path / "line") == 0.0
    assert waited_s(tmp_path / "none") == 0.0


def test_exchanges_of_several_threads_are_counted(tmp_path: Path) -> None:
    line = LineUse(tmp_path / "line", monotonic=Time().monotonic)
    go_on = threading.Event()

    def long() -> None:
        with line.exchange():
            go_on.wait()

    thread = threading.Thread(target=long)
    with line.exchange():
        thread.start()
    assert waited_s(tmp_path / "line") > 1.0
    go_on.set()
    thread.join()
    assert waited_s(tmp_path / "line") == 0.0
    line.close()
