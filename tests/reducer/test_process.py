from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.config import WorkerEnvironment, child_environment
from atoll.hub.rounds import service
from atoll.hub.scheduler import reducer_hosts
from atoll.reducer.__main__ import main
from tests.contracts.group_suite import assert_same_everywhere, one_round, together, values
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.patience import PATIENCE_S


class ProcessWorld(HubWorld):
    """The reducer is `python -m atoll.reducer`."""

    process: subprocess.Popen[str]

    def start_reducer(self) -> None:
        worker = WorkerEnvironment(
            hub=self.hub.url, token=self.tokens["reducer"], job=self.job, member="reducer",
            directory=Path(), spec=Path(),
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll.reducer"],
            env=child_environment(worker, threads=1),
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessWorld]:
    # Nothing here starts the process that the hub would ask for if this one took long to start.
    monkeypatch.setattr(reducer_hosts, "START_S", PATIENCE_S)
    monkeypatch.setattr(service, "SILENT_S", PATIENCE_S)  # a member that is slow is waited for
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        world = ProcessWorld(node, 2, route="relay")
        yield world
        print("the reducer's status before its end:", world.process.poll())
        world.process.kill()
        print(world.process.communicate(timeout=PATIENCE_S)[1])
        world.close()
        node.link.close()


def test_reducer_process_serves_its_job_and_leaves_when_told(world: ProcessWorld) -> None:
    results = together(world, lambda group: one_round(group, values(group.me, (3000,))))
    assert_same_everywhere([agreed.reduced for agreed in results])
    a, b = values("w0", (3000,))[0], values("w1", (3000,))[0]
    assert torch.equal(results[0].reduced.tensors[0], (a + b) / 2)
    os.kill(world.process.pid, signal.SIGTERM)
    _, said = world.process.communicate(timeout=PATIENCE_S)
    assert world.process.returncode == 0, said


def test_without_its_environment_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ATOLL_JOB", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main([]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "ATOLL_JOB" in caplog.text
