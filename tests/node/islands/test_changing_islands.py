"""Islands that lose ranks or gain machines: they shrink, or are planned anew."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from atoll.config import (
    IslandTable,
    JobSpec,
    StrategyTable,
    TrainTable,
    parse_spec,
)
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.rank_supervisor import HERE, MachineChange, RankSupervisor
from atoll.node.islands.rendezvous import LeaveRequest, NewsQueue, Rendezvous
from atoll.node.islands.rendezvous_server import Follower, Joined
from atoll.plan.pipelines import PipelinePlan
from atoll.wire.limits import EXIT_LEFT
from tests.node.islands.local_ranks import (
    island_of,
    to_end,
)
from tests.node.launchers.ordering import run
from tests.patience import PATIENCE_S

# ------------------------------------------------------------------------------ fewer ranks


SHRINKS = """
ranks = int(os.environ["WORLD_SIZE"])
print("there are", ranks, flush=True)
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if ranks > 1 else 0)
"""


@pytest.mark.parametrize(("on_loss", "sizes"), [("wait", [3, 3, 3]), ("shrink", [3, 3, 2, 1])])
def test_islands_that_keep_losing_ranks_shrink_if_they_may(
    tmp_path: Path, on_loss: str, sizes: list[int]
) -> None:
    command = island_of(SHRINKS, ranks=3, on_loss=on_loss)
    found = []
    for _ in sizes:
        ended, lines = run(to_end(command, tmp_path))
        found.append(int(next(line for line in lines if "there are" in line).split()[-1]))
    assert found == sizes
    assert (ended.code == 0) is (sizes[-1] == 1)


# --------------------------------------------------------------------------- more machines


TELLS_OF_LEAVING = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
text = pathlib.Path(os.environ["ATOLL_SPEC"]).read_text()
pathlib.Path(sys.argv[1]).write_text(text)
time.sleep(600)
"""


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.every(2)
def test_elastic_islands_are_planned_anew_with_a_new_machine(tmp_path: Path, known: bool) -> None:
    link: Any = None
    late = Follower(1, "w0.1 on attic", link)
    plan = PipelinePlan(
        stages=1, replicas=1, rows=2, microbatches=4, cuts=(), predicted_s=1.0, reduce_s=0.0,
        worst_bytes=0,
    )  # fmt: skip
    spec = JobSpec(
        train=TrainTable(batch=8), strategy=StrategyTable(inner="pipeline"),
        island=IslandTable(ranks=2, machines=2, elastic=True),
    )  # fmt: skip
    environment: Any = SimpleNamespace(directory=tmp_path, member="w0", spec=tmp_path / "job.toml")
    news: NewsQueue = queue.SimpleQueue()
    leaving, up = threading.Event(), tmp_path / "up"
    island = RankSupervisor(
        environment,
        Rendezvous(plan.mesh, "127.0.0.1", plan=plan, known=(late,) if known else ()),
        number=0, program=(sys.executable, "-c", TELLS_OF_LEAVING, str(up)), news=news,
        leaving=leaving,
    )  # fmt: skip
    island.start(spec, port=1)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (up.exists() and up.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert parse_spec(up.read_text()).train.accumulate == 4, "the rank has the planned job"
        news.put(Joined(late))
        if known:  # it was there before: only a request ends the island
            news.put(LeaveRequest())
        else:
            change = island.wait()
            assert change == MachineChange(late, leaves=False)
            assert not island.goes_on_with(Rendezvous(plan.mesh, HERE, followers=(late,)))
            assert island.goes_on_with(Rendezvous(plan.mesh, HERE, plan=plan, known=(late,)))
            news.put(Joined(late))  # it is known now: nothing is to be done
            island.leave(change)
        ended = island.wait()
        assert isinstance(ended, RankExit)
        assert (ended.rank, ended.code) == (0, EXIT_LEFT)
        assert not leaving.is_set()
    finally:
        for child in psutil.Process().children():
            if TELLS_OF_LEAVING in child.cmdline():
                child.kill()
