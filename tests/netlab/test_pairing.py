"""A machine finds the hub of its network and pairs by the code, with nothing but `atoll join`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.netlab.lab import Lab
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab]

HUB, OTHER = 0, 1
ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
print(HubClient(sys.argv[1], sys.argv[2], endpoint=HubEndpoint(ca=sys.argv[3])).pairing()["code"])
"""


@contextlib.contextmanager
def started(lab: Lab, host: int, *words: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """Run Python on a host; it ends with the block."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    popen: subprocess.Popen[str] = lab.popen(
        host, [sys.executable, *words], env={**os.environ, **own, "ATOLL_HOME": str(home)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield popen
    finally:
        popen.kill()
        popen.communicate(timeout=PATIENCE_S)


def test_join_finds_the_hub_of_its_network(tmp_path: Path) -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    serving: tuple[str, ...] = ("-m", "atoll.hub", "--host", "0.0.0.0", "--no-reducers")
    serving += ("--data", str(tmp_path / "hub"), "--jobs", str(tmp_path / "runs"))
    with Lab(hosts=2) as lab, started(lab, HUB, *serving, home=tmp_path) as hub:
        assert hub.stdout is not None
        ready = json.loads(hub.stdout.readline())
        asking = ("-c", CODE, ready["url"], ready["operator_token"], ready["ca"])
        with started(lab, HUB, *asking, home=tmp_path) as process:
            code = process.communicate(timeout=PATIENCE_S)[0].strip()
        joining = ("-m", "atoll.cli", "join", "--name", "far", "--code", code)
        with started(lab, OTHER, *joining, home=tmp_path / "far") as joined:
            assert joined.stdout is not None
            said = ""
            while "joined" not in said and (line := joined.stdout.readline()):
                said += line
            joined.send_signal(signal.SIGINT)
            said += joined.communicate(timeout=PATIENCE_S)[0]
        assert f":{ready['port']} as far" in said, said
        assert "left the hub" in said
