"""A member that starts again on a line that is slower than the rounds takes part again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from bench.slowlink import HUB, Site
from bench.tune import Hosts
from tests.netlab.test_replanning import view
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab, pytest.mark.timeout(1200)]

JOB = """
[job]
name = "planned-slow-lines"
nodes = 3
[model]
layers = 4
width = 256
heads = 4
context = 32
[train]
batch = 1
steps = 1000000
eval_tokens = 64
[strategy]
preset = "diloco"
codec = "int8"
every = 10
[checkpoint]
every_s = 0
"""
"""The state has 50 MB, half of it the optimizer's. The other half takes 67 s at 3 Mbit/s; a round
usually waits for 60 s at most."""

MEMBERS, LATE = 3, 3


def until(site: Site, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 5 * PATIENCE_S
    while not true(found := view(site)):
        events = [event["text"] for event in found["events"][-8:]]
        assert time.monotonic() < deadline, "\n".join(events)
        time.sleep(1.0)
    return found


def taking_part(found: dict[str, Any]) -> int:
    """Return the members of the last round."""
    return len(found["rounds"][-1]["timeline"]) if found["rounds"] else 0


def worker_of(node: int) -> psutil.Process:
    for process in psutil.Process(node).children(recursive=True):
        if "atoll.node.worker" in " ".join(process.cmdline()):
            return process
    raise AssertionError("the node runs no worker")


@pytest.mark.long(
    "tests/rounds/test_slow_recovery.py::test_a_slow_line_is_waited_for_once_that_costs_no_more"
)
def test_a_member_on_a_slow_line_takes_part_again(tmp_path: Path) -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=MEMBERS + 1) as lab:
        for host in range(1, MEMBERS + 1):
            lab.shape(host, Shape(up_bps=3e6, down_bps=3e6, rtt_s=0.02))
        site = Hosts(tmp_path, lab, least_step_s=0.5)
        try:
            site.gather(MEMBERS)
            (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
            site.start(HUB, "run", str(tmp_path / "job.toml"))
            until(site, lambda found: taking_part(found) == MEMBERS and len(found["rounds"]) > 3)

            late = worker_of(site.nodes[LATE].pid)
            late.kill()
            until(site, lambda found: taking_part(found) < MEMBERS)
            found = until(site, lambda found: taking_part(found) == MEMBERS)
            kinds = [event["kind"] for event in found["events"]]
            assert "waits-to-recover" in kinds, kinds
        finally:
            site.close()
