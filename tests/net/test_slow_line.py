from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.netlab.lab import Lab
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("slow_line.py"))


@pytest.mark.long("tests/net/test_throttle.py::test_capped_tensors_let_heartbeats_through")
def test_request_overtakes_tensors_on_a_slow_line(tmp_path: Path) -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    hub = [
        *(sys.executable, "-m", "atoll.hub", "--no-reducers", "--host", "0.0.0.0"),
        *("--port", "7700", "--data", str(tmp_path / "data"), "--jobs", str(tmp_path / "jobs")),
    ]
    with Lab(hosts=2, up="5mbit", rtt="40ms") as lab:
        serving = lab.popen(0, hub, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        with serving:
            try:
                assert serving.stdout is not None
                ready = json.loads(serving.stdout.readline())
                place = ("https://h0:7700", ready["operator_token"], ready["ca"])
                client = [sys.executable, SCRIPT, *place, str(3 * 2**20)]
                done = lab.run(
                    1, client, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
                )
            finally:
                serving.terminate()
    assert done.returncode == 0, done.stderr
    waits = [float(line) for line in done.stdout.split()]
    assert len(waits) >= 3  # 3 MiB take five seconds at 5 Mbit/s, whatever the waits are
    assert max(waits) < 2.0
