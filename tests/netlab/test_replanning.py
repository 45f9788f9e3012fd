"""A running job of real workers is planned again when a machine comes, and when a line changes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.netlab.lab import Lab
from atoll.netlab.shape import Shape
from bench.slowlink import HUB, Site
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab, pytest.mark.timeout(900)]

JOB = """
[job]
name = "planned"
nodes = 3
min_nodes = 2
route = "relay"
planned = ["every", "codec"]
[model]
layers = 1
width = 64
heads = 2
context = 32
[train]
batch = 2
steps = 1000000
pace = "equal"
eval_tokens = 64
[strategy]
preset = "local-sgd"
codec = "auto:fp32"
every = 10
[checkpoint]
every_s = 0
"""
VIEW = """
import json
from atoll.cli.hub_access import find
with find().client() as client:
    job = next((j["job"] for j in client.jobs() if j["job"].startswith("planned")), "")
    rounds = client.rounds(job)["rounds"][-8:] if job else []
    events = client.events(job)["events"] if job else []
    print(json.dumps({"nodes": client.nodes(), "rounds": rounds, "events": events}))
"""


def view(site: Site) -> dict[str, Any]:
    done = site.lab.run(
        HUB, [sys.executable, "-c", VIEW], env=site.environment(HUB), capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def until(site: Site, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 3 * PATIENCE_S
    while not true(found := view(site)):
        assert time.monotonic() < deadline, json.dumps(found)[-4000:]
        time.sleep(1.0)
    return found


def notices(found: dict[str, Any]) -> list[str]:
    return [event["text"] for event in found["events"] if event["kind"] == "planned-again"]


def steps_of(round_: dict[str, Any]) -> list[int]:
    return [row["steps"] for row in round_["timeline"]]


def measured(found: dict[str, Any]) -> int:
    return sum(bool(row["stats"].get("up_bps")) for row in found["nodes"] if row.get("stats"))


@pytest.mark.long(
    "tests/hub/planning/test_replanning.py::test_slower_lines_give_a_longer_interval_for_good"
)
def test_a_new_machine_and_a_longer_line_are_planned_for(tmp_path: Path) -> None:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    near = Shape(up_bps=50e6, down_bps=50e6, rtt_s=0.01)
    with Lab(hosts=4) as lab:
        for host in (1, 2, 3):
            lab.shape(host, near)
        site = Site(tmp_path, lab)
        try:
            site.gather(2)
            until(site, lambda found: measured(found) == 2)
            (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
            site.start(HUB, "run", str(tmp_path / "job.toml"))
            until(site, lambda found: len(found["rounds"]) >= 3)
            assert notices(view(site)) == []

            site.join(3)
            found = until(site, lambda found: len(notices(found)) == 1)
            assert "n3" in notices(found)[0]

            lab.shape(1, Shape(up_bps=50e6, down_bps=50e6, rtt_s=1.2))
            found = until(site, lambda found: len(notices(found)) == 2)
            text = notices(found)[1]
            assert text.startswith("planned again: every "), text
            assert "n1's round trip" in text
            every = int(text.split("every ")[1].removeprefix("stays ").split()[0].strip(","))
            assert every > 10, notices(found)
            # All members do the new interval's steps, and go on after that.
            until(site, lambda found: steps_of(found["rounds"][-1]) == [every] * 3)
        finally:
            site.close()
