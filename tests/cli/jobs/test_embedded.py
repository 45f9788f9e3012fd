from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cli.jobs.embedded import Embedded, accelerators_of
from atoll.cli.jobs.interrupts import Interrupts
from atoll.config.environment import visible_accelerators
from atoll.errors import PortTaken


@pytest.mark.parametrize(
    ("nodes", "visible", "expected"),
    [
        (1, ["0", "1"], [[]]),
        (4, [], [[], [], [], []]),
        (4, ["0"], [[], [], [], []]),
        (2, ["0", "1"], [["0"], ["1"]]),
        (2, ["0", "1", "2", "3"], [["0", "2"], ["1", "3"]]),
        (3, ["4", "GPU-a"], [["4"], ["GPU-a"], ["4"]]),
    ],
)
def test_local_nodes_share_out_the_accelerators(
    nodes: int, visible: list[str], expected: list[list[str]]
) -> None:
    assert [accelerators_of(number, nodes, visible) for number in range(nodes)] == expected


def test_accelerators_that_this_process_may_not_use_stay_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_accelerators(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_accelerators(8) == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_accelerators(8) == []


class ThenPrinted(Interrupts):
    """After a wait, what a process had printed arrives."""

    def __init__(self, pipe: int, text: str) -> None:
        super().__init__()
        self._pipe, self._text = pipe, text

    def until(self, condition: Callable[[], bool], *, timeout_s: float, every_s: float) -> bool:
        found = super().until(condition, timeout_s=timeout_s, every_s=every_s)
        os.write(self._pipe, self._text.encode())
        os.close(self._pipe)
        return found


def test_the_last_lines_of_a_hub_that_has_ended_are_read(tmp_path: Path) -> None:
    error = PortTaken("the hub cannot listen on this port")
    reading, writing = os.pipe()
    hub = subprocess.Popen([sys.executable, "-c", ""])
    with hub, os.fdopen(reading, "rb") as hub.stdout:
        hub.wait()
        embedded = Embedded(folder=tmp_path, jobs=tmp_path, nodes=1)
        text = json.dumps({"error": error.to_dict()}) + "\n"
        with pytest.raises(PortTaken):
            embedded._read_ready(hub, ThenPrinted(writing, text))
