"""`atoll rehearse` with real processes on shaped lines: the example, and Ctrl+C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.netlab import registry
from atoll.netlab.lab import Lab
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "planning"


def started(*words: str) -> subprocess.Popen[str]:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "rehearse", *words], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "120"},
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.long(
    "tests/rehearse/test_simulated.py::test_simulated_members_are_as_fast_as_predicted"
)
def test_the_example_goes_through_its_faults_as_predicted() -> None:
    words = [str(EXAMPLES / "small.toml"), "--machines", str(EXAMPLES / "faults.toml")]
    command = started(*words, "--minutes", "1.5", "--json")
    out, errors = command.communicate(timeout=800)
    assert command.returncode == 0, errors
    found = json.loads(out)
    assert found["real"]
    assert found["finished"]
    assert [text for _, text in found["events"]] == [
        "laptop is killed", "old joins", "laptop starts again", "desk loses its line",
        "desk has its line again",
    ]  # fmt: skip
    # Of seconds only this is promised where other tests share the cores.
    assert abs(found["error"]) < 1.0, found["verdict"]
    last = found["rows"][-1]
    assert last["seen"]["rounds"] == pytest.approx(last["predicted"]["rounds"], rel=0.5)
    assert last["seen"]["loss"] < found["rows"][0]["seen"]["loss"]


def test_ctrl_c_ends_every_process_and_removes_every_namespace() -> None:
    words = [str(EXAMPLES / "small.toml"), "--machines", str(EXAMPLES / "faults.toml")]
    command = started(*words, "--steps", "2000", "--minutes", "60")
    stderr = command.stderr
    assert stderr is not None
    said = []
    for line in stderr:
        said.append(line)
        if "they train" in line:
            break
    started_here = {child.pid for child in psutil.Process(command.pid).children(recursive=True)}
    inside = {name: set(registry.processes_of(name)) for name in registry.all_labs()}
    mine = {name for name, found in inside.items() if found & started_here}
    running = [process for name in mine for process in inside[name]]
    assert len(running) >= 4, said  # a hub, its reducer perhaps, two agents, two members
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert not mine & set(registry.all_labs())
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{process}").exists() for process in running):
        assert time.monotonic() < deadline
        time.sleep(0.1)
