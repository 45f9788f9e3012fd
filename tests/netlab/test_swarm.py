"""A SWARM over slow, long lines, with losses, trains what one process trains."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.config import parse_spec
from atoll.netlab.lab import Lab
from atoll.wire.manifest import MANIFEST_NAME
from tests.e2e.swarm.test_runs import losses_of_one_process
from tests.netlab.curve import curve_of
from tests.netlab.test_cut import Machines, until
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab]

BATCH = 12
JOB = """
[job]
name = "swarm"
nodes = {members}
min_nodes = {stages}
[model]
name = "bench.swarm.stand_in:tower"
context = 16
width = {width}
blocks = {stages}
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 12
lr = 4e-3
clip = 1e6
eval_tokens = 512
[strategy]
preset = "swarm"
[swarm]
stages = {stages}
microbatches = 6
codec = "fp32"
rebalance_s = 0
[checkpoint]
every = {every}
"""
VIEW = """
import json, sys
from atoll.net.http.client import HubClient
from atoll.net.endpoint import HubEndpoint
client = HubClient(sys.argv[1], sys.argv[2], endpoint=HubEndpoint(ca=sys.argv[3]))
print(json.dumps(client.job(sys.argv[4])))
"""


@contextlib.contextmanager
def swarm(
    folder: Path, *, rate: str, rtt: str, members: int, spare: int = 0, every: int = 0,
    width: int = 32, **options: int,
) -> Iterator[Machines]:  # fmt: skip
    """Yield a job on so many machines; `spare` ones are there and not started."""
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=members + spare + 1, rate=rate, rtt=rtt) as lab:
        machines = Machines(
            lab, folder, members=members, spec=JOB, every=every, width=width, **options
        )
        try:
            yield machines
        finally:
            lab.stop()
            machines.close()


def view_of(machines: Machines) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machines.ask(VIEW, machines.job))
    assert found["state"] != "failed", machines.report()
    return found


def wait_for_step(machines: Machines, step: int) -> None:
    """Wait until a member has reported this step; the hub's file shows it without a process."""

    def there() -> bool:
        return any(point["step"] >= step for point in machines.lines("metrics.jsonl"))

    until(there, machines, timeout_s=3 * PATIENCE_S)


def newest_save(machines: Machines) -> int:
    """Return the step of the newest complete checkpoint; 0: the start."""
    folder = machines.folder / "jobs" / machines.job / "checkpoints"
    found = [path.parent.name for path in folder.glob(f"round-*/{MANIFEST_NAME}")]
    return max((int(name.rpartition("-")[2]) for name in found), default=0)


def workers(machines: Machines, member: str = "") -> list[psutil.Process]:
    """Return the processes of a member of the job, or of all."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            own = process.environ()
            if own.get("ATOLL_JOB") == machines.job and member in ("", own.get("ATOLL_MEMBER")):
                found.append(process)
    return found


def kill(machines: Machines, member: str) -> None:
    """Kill a worker; its node starts it again, and it joins."""
    found = workers(machines, member)
    assert found, f"{member} does not run:\n{machines.report()}"
    for process in found:
        process.kill()


def lose(machines: Machines, member: str) -> None:
    """Kill a worker and its node's agent, for good."""
    (node,) = [m["node"] for m in view_of(machines)["members"] if m["member"] == member]
    machines.agents[node].kill()
    for process in workers(machines, member):  # it ends with its agent, if not at once
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def stages_of(machines: Machines) -> list[list[dict[str, Any]]]:
    """Return the members of each stage."""
    swarm = view_of(machines)["swarm"]
    return [stage["peers"] for stage in swarm["stages"]] if swarm else []


def is_member(machines: Machines, node: str) -> bool:
    return node in {member["node"] for member in view_of(machines)["members"]}


def check_end(
    machines: Machines, *, untold: int = 0, saved: int = 0, killed: float = 0.0
) -> set[int]:
    """The losses of all steps, but for `untold` ones, are those of one process without machines.

    `saved` and `killed`: see `curve_of`. Return the steps that were reported.
    """
    until(lambda: view_of(machines)["state"] == "done", machines, timeout_s=3 * PATIENCE_S)
    results = [m["result"] for m in view_of(machines)["members"] if m["result"]]
    last = [result for result in results if result.get("loss") is not None]
    assert sum(result["rows"] for result in last) == BATCH, results
    loss = sum(result["loss"] * result["rows"] for result in last) / BATCH
    spec = parse_spec(machines.spec)
    assert {r["steps"] for r in results if "stage" in r} == {spec.train.steps}, results
    calm = losses_of_one_process(spec, steps=spec.train.steps)
    noise = 0.01 * (calm[0] - calm[-1])
    assert calm[-1] < calm[0] - 0.05
    assert loss == pytest.approx(calm[-1], abs=noise)
    points, stages = machines.lines("metrics.jsonl"), spec.swarm.stages
    found = curve_of(points, stages=stages, batch=BATCH, saved=saved, killed=killed)
    expected = {steps: statistics.fmean(calm[step - 1] for step in steps) for steps in found}
    assert found == pytest.approx(expected, abs=noise)
    reported = {step for steps in found for step in steps}
    assert len(reported) >= spec.train.steps - untold, sorted(reported)
    return reported


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_members_join_and_a_killed_driver_is_replaced"
)
def test_two_lost_and_two_new_machines_at_50_ms(tmp_path: Path) -> None:
    """Three members per stage, of speeds 1 : 2 : 3; a machine of each stage is lost for good."""
    options = {"stages": 2, "steps": 40}
    with swarm(
        tmp_path, rate="100mbit", rtt="50ms", members=6, spare=2, **options
    ) as machines:  # fmt: skip
        for step, stage, new in ((3, 0, 7), (7, 1, 8)):
            wait_for_step(machines, step)
            lose(machines, stages_of(machines)[stage][0]["member"])
            machines.start_agent(new)
            name = f"n{new}"
            until(functools.partial(is_member, machines, name), machines, timeout_s=PATIENCE_S)
        assert view_of(machines)["state"] == "running", machines.report()
        check_end(machines, untold=4)


@pytest.mark.long("tests/swarm/test_saves.py::test_after_a_restart_the_newest_history_is_believed")
def test_four_stages_survive_the_hub_at_80_ms(tmp_path: Path) -> None:
    with swarm(tmp_path, rate="20mbit", rtt="80ms", members=8, stages=4, steps=8) as machines:
        wait_for_step(machines, 3)
        machines.hub.kill()
        machines.hub.wait(PATIENCE_S)
        machines.start_hub()
        check_end(machines, untold=3)


@pytest.mark.long(
    "tests/train/swarm/test_member.py::test_a_lost_stage_goes_on_from_a_checkpoint_with_all"
)
def test_everything_is_killed_and_goes_on_from_a_save(tmp_path: Path) -> None:
    options = {"stages": 2, "steps": 12, "every": 3}
    with swarm(tmp_path, rate="100mbit", rtt="50ms", members=4, **options) as machines:
        until(lambda: newest_save(machines) >= 3, machines, timeout_s=3 * PATIENCE_S)
        wait_for_step(machines, 5)
        for process in (machines.hub, *machines.agents.values()):
            process.kill()
        for worker in workers(machines):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        machines.hub.wait(PATIENCE_S)
        killed, saved = time.time(), newest_save(machines)
        machines.start_hub()
        for host in range(1, 5):
            machines.start_agent(host)
        # A member may be killed before it has reported the step that others have saved.
        curve = check_end(machines, untold=1, saved=saved, killed=killed)
        assert set(range(saved + 1, 13)) <= curve
        again = machines.lines("metrics.jsonl", since=killed)
        assert min(point["step"] for point in again if "loss" in point["values"]) == saved + 1


@pytest.mark.long("tests/swarm/test_saves.py::test_a_lost_saver_is_replaced_while_the_step_lasts")
def test_a_saver_is_killed_during_its_upload(tmp_path: Path) -> None:
    """A file of a stage takes seconds on these lines; the step is saved by another member.

    On a busy machine the first upload begins four steps after its step; a member that is killed
    after the last one has reported to no one what it computed of it.
    """
    options = {"stages": 2, "steps": 16, "every": 2, "width": 384}
    with swarm(tmp_path, rate="5mbit", rtt="80ms", members=4, **options) as machines:
        wait_for_step(machines, 2)
        incoming = machines.folder / "jobs"

        def uploading() -> bool:
            parts = [path for path in incoming.rglob("*") if ".incoming" in str(path)]
            return any(path.is_file() and path.stat().st_size for path in parts)

        until(uploading, machines, timeout_s=PATIENCE_S)
        for stage in stages_of(machines):
            kill(machines, stage[0]["member"])
        check_end(machines, untold=3)
        assert "checkpoint of round 16 is complete" in machines.report()


@pytest.mark.long("tests/group/peers/test_nearest.py::test_what_nobody_answers_at_is_relayed")
def test_a_blocked_way_leads_through_the_hub(tmp_path: Path) -> None:
    """Members that reach each other send directly; those that do not, through the hub."""
    with swarm(tmp_path, rate="100mbit", rtt="20ms", members=2, stages=2, steps=12) as machines:

        def shares() -> list[float | None]:
            return [peer["direct"] for stage in stages_of(machines) for peer in stage]

        until(lambda: all((s or 0.0) > 0.5 for s in shares() or [0.0]), machines, timeout_s=60.0)
        for host, other in ((1, 2), (2, 1)):
            address = f"{machines.lab.address(other)}/32"
            machines.lab.run(host, ["ip", "route", "add", "blackhole", address], check=True)
        until(lambda: all((s or 1.0) < 0.5 for s in shares() or [1.0]), machines, timeout_s=90.0)
        check_end(machines)
