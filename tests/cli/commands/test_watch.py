"""`atoll watch` brings the live panel of a running job back, in 80 columns, until Ctrl+C."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from atoll.cli import hub_access
from atoll.hub.server import HubServer
from tests.dashboard.scene import Scene
from tests.hub.membership import options
from tests.patience import PATIENCE_S

COLUMNS, ROWS = 80, 40
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with HubServer(options(tmp_path)) as hub, Scene(hub) as made:
        hub_access.remember(hub_access.KnownHub(hub.url, hub.operator_token, operator=True))
        yield made


class Terminal:
    """A command on a terminal of 80 columns."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *words], stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(theirs)
        self._read_so_far = b""

    def until(self, *words: str) -> None:
        """Read until all these words were shown."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(word in self.shown for word in words):
            assert time.monotonic() < deadline, self.shown
            self._read(0.2)

    def end(self) -> int:
        """Read the rest and return the exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self._read(0.2)
        while self._read(PATIENCE_S):  # to the end: the last output may still be on its way
            pass
        os.close(self._ours)
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        """Read what there is, or comes in this time; return whether there was anything."""
        ready, _, _ = select.select([self._ours], [], [], wait_s)
        received = b""
        if ready:
            with contextlib.suppress(OSError):  # the other end is closed
                received = os.read(self._ours, 65536)
        self._read_so_far += received
        return bool(received)

    @property
    def shown(self) -> str:
        """All output without the terminal's codes; a piece may end in the midst of one."""
        return CONTROL.sub("", self._read_so_far.decode("utf-8", "replace"))

    @property
    def lines(self) -> list[str]:
        return re.split(r"[\r\n]+", self.shown)


def test_panel_comes_back_and_ctrl_c_leaves_the_job_running(scene: Scene) -> None:
    job = scene.submit("shakespeare")
    scene.train(job, steps=150, rounds=2)
    terminal = Terminal("watch", "shake")  # the beginning of a name is enough
    terminal.until(job, "running", "attic-gpu", "kitchen-1", "Ctrl+C leaves it running", "150")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert f"{job} continues in the background" in terminal.shown
    assert scene.view(job)["state"] == "running"
    assert max(cell_len(line) for line in terminal.lines) <= COLUMNS


def test_without_a_name_it_is_the_newest_that_runs(scene: Scene) -> None:
    scene.submit("older", nodes=1)
    newer = scene.submit("newer", nodes=1)
    scene.start(newer)
    terminal = Terminal("watch")
    terminal.until(newer, "running")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130


def test_a_name_that_no_job_has_is_one_sentence(scene: Scene) -> None:
    job = scene.submit("shakespeare", nodes=1)
    terminal = Terminal("watch", "shakspeare")
    assert terminal.end() == 1
    assert "shakspeare" in terminal.shown
    assert job in terminal.shown  # what there is
    assert "Traceback" not in terminal.shown
