"""A message bus of the test's own, which programs that it starts take for the system's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a message bus and let it be the system's for the programs that the test starts."""
    if not shutil.which("dbus-daemon") or not shutil.which("dbus-monitor"):
        pytest.skip("there is no dbus-daemon or dbus-monitor here")
    address = f"unix:path={tmp_path}/bus"
    daemon = subprocess.Popen(
        ["dbus-daemon", "--session", "--nofork", "--print-address", f"--address={address}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline().startswith("unix:")
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    yield
    daemon.terminate()
    daemon.communicate()


def announce(sleeping: str) -> None:
    """Send the signal that the login manager sends."""
    subprocess.run(
        [
            *("dbus-send", "--system", "--type=signal", "/org/freedesktop/login1"),
            *("org.freedesktop.login1.Manager.PrepareForSleep", f"boolean:{sleeping}"),
        ],
        check=True,
        timeout=PATIENCE_S,
    )
