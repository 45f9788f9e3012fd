"""What a machine says about itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    found = probe.measure_compute()
    assert not found.error
    assert found.gflops > 0.1


def test_trial_that_takes_too_long_is_given_up_and_said() -> None:
    assert "longer than" in probe.measure_compute(timeout_s=0.01).error
