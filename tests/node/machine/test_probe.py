"""What a machine says about itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.node.machine import probe
from tests.patience import PATIENCE_S


def test_description_is_complete_and_plausible(tmp_path: Path) -> None:
    info = probe.node_info(tmp_path / "not" / "there", slots=3)
    assert info.slots == 3
    assert info.cores >= 1
    assert info.memory_bytes > 10**8
    assert info.disk_free_bytes > 0
    assert info.torch == probe.torch_version()
    assert info.python.count(".") == 2


def test_describing_a_machine_never_loads_torch() -> None:
    code = (
        "import sys, pathlib; from atoll.node.machine import probe;"
        "from atoll.node.agent import serve, agent, reports;"
        "probe.node_info(pathlib.Path('.')); reports.HeartbeatStats(pathlib.Path('.'))();"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode
        == 0
    )


def test_trial_in_another_process_measures_a_speed() -> None:
    found = probe.measure_compute(timeout_s=PATIENCE_S)
    assert not found.error
    assert found.gflops > 0.1


def test_trial_that_takes_too_long_is_given_up_and_said() -> None:
    assert "longer than" in probe.measure_compute(timeout_s=0.01).error


def counted(monkeypatch: pytest.MonkeyPatch, *, error: str = "") -> list[probe.Compute]:
    """Let trials be instant; return the list of them."""
    made: list[probe.Compute] = []

    def trial(*, device: str) -> probe.Compute:
        made.append(probe.Compute(gflops=len(made) + 1.0, error=error))
        return made[-1]

    monkeypatch.setattr(probe, "measure_compute", trial)
    return made


def test_trial_is_reused_by_the_next_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    found = [probe.known_compute(tmp_path / "new", probe.Gpus()) for _ in range(3)]
    assert [compute.gflops for compute in found] == [1.0, 1.0, 1.0]
    assert len(made) == 1


@pytest.mark.parametrize("change", ["torch", "cores", "age", "damage", "other keys"])
def test_trial_is_made_anew_when_it_no_longer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    counted(monkeypatch)
    path = tmp_path / "compute.json"
    assert probe.known_compute(tmp_path, probe.Gpus()).gflops == 1.0
    match change:
        case "torch":
            monkeypatch.setattr(probe, "torch_version", lambda: "99")
        case "cores":
            monkeypatch.setattr(probe, "usable_cores", lambda: 999)
        case "age":
            old = time.time() - probe.REUSED_S - 1
            os.utime(path, (old, old))
        case "damage":
            path.write_bytes(path.read_bytes()[:-9])
        case _:
            path.write_text(path.read_text().replace("gflops", "speed"))
    assert probe.known_compute(tmp_path, probe.Gpus()).gflops == 2.0
    assert probe.known_compute(tmp_path, probe.Gpus()).gflops == 2.0


def test_failed_trial_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, error="no torch")
    for _ in range(2):
        assert probe.known_compute(tmp_path, probe.Gpus()).error
    assert not (tmp_path / "compute.json").exists()


def test_join_works_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch)
    (tmp_path / "file").write_text("")
    assert probe.known_compute(tmp_path / "file" / "below", probe.Gpus()).gflops == 1.0
