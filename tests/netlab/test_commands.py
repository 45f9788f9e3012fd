"""Commands that do not end."""

from __future__ import annotations

import sys

import pytest

from atoll.netlab import commands
from atoll.netlab.commands import LabError


def test_a_command_that_does_not_end_is_an_error_of_the_lab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.05)
    with pytest.raises(LabError, match=r"does not end.*killed after 0.05 s"):
        commands._run([sys.executable, "-c", "import threading; threading.Event().wait()"])
