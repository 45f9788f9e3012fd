"""Nodes from a real Slurm: they join, train, one is lost, the rest finish, and the job ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Atoll, atoll, until
from tests.patience import PATIENCE_S
from tests.slurm.cluster import SlurmCluster, unavailable

__all__ = ["atoll"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def on_the_cluster(atoll: Atoll, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Atoll:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    return atoll


def test_three_tasks_join_train_lose_one_and_end(
    on_the_cluster: Atoll, cluster: SlurmCluster
) -> None:
    atoll = on_the_cluster
    hub = atoll.hub()
    done = atoll.run("nodes", "slurm", "--count", "3", "--time", "0:30:00", "--folder", "cluster")
    assert done.code == 0, done.both
    assert "submitted job" in done.out
    folder = atoll.folder / "cluster"
    assert (folder / "ticket").stat().st_mode & 0o077 == 0
    secret = (folder / "ticket").read_text().strip()
    assert secret not in (folder / "nodes.sbatch").read_text()

    with hub.client() as client:
        until(lambda: len(client.nodes()) == 3)
    job = atoll.job(steps=200, every=10, paced=True, nodes="{min = 2, max = 3}")
    running = atoll.start("run", str(job))
    until(lambda: len(atoll.workers()) == 3)
    number = cluster.ask("squeue", "-h", "-o", "%i").split()[0]

    agents = [
        process
        for process in atoll.running("join")
        if "--name" in process.cmdline() and f"slurm-{number}-2" in process.cmdline()
    ]
    python = [process for process in agents if "python" in Path(process.exe()).name]
    family = [*python[0].children(recursive=True), python[0]]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=PATIENCE_S)

    ended = running.wait()
    assert ended.code == 0, ended.both
    summary = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert sum(member["finished"] for member in summary["members"]) == 2
    assert cluster.ask("squeue", "-h", "-o", "%T") == "RUNNING"  # the lost task took none with it
    cluster.ask("scancel", "--signal=TERM", number)
    until(lambda: not cluster.ask("squeue", "-h"))
    log = (folder / f"{number}.log").read_text()
    assert log.count("left the hub") == 2


def test_what_slurm_refuses_is_said(on_the_cluster: Atoll) -> None:
    atoll = on_the_cluster
    atoll.hub()
    done = atoll.run("nodes", "slurm", "--count", "1", "--partition", "missing")
    assert done.code != 0
    assert "Slurm refused the job" in done.both
    assert "missing" in done.both or "partition" in done.both
