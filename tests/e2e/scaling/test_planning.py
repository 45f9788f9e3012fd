"""The planner on a hub with two real nodes: lines between them, and a job that it plans."""

from __future__ import annotations

import json

import pytest

from atoll.config import parse_spec
from atoll.fleet.reading import parse_fleet
from tests.e2e.conftest import Atoll, ticket_of, until
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_lines_are_measured_and_a_job_runs_as_planned(atoll: Atoll) -> None:
    hub = atoll.hub()
    for name in ("desk", "attic"):
        atoll.join(ticket_of(hub), name=name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
        until(lambda: all((row.get("stats") or {}).get("up_bps") for row in client.nodes()))
    done = atoll.run_here("plan", "fleet", "--lines", "0.2")
    assert done.code == 0, done.both
    fleet = parse_fleet(done.out)
    names = {machine.name for machine in fleet.machines}
    assert len(names) == 2
    assert {link.ends for link in fleet.links} == {(a, b) for a in names for b in names if a != b}
    # On a busy machine a few blocks may take seconds.
    assert all(link.mbps > 0.01 and link.latency_ms > 0 for link in fleet.links)
    assert fleet.all_reach(fleet.machines)  # so that the planner tries the direct route
    job = atoll.job(steps=60, every=10)
    ran = atoll.run("run", str(job), "--plan", "auto", timeout_s=3 * PATIENCE_S)
    assert ran.code == 0, ran.both
    assert "planned" in ran.out
    (folder,) = [path for path in atoll.runs.iterdir() if path.name.startswith("tiny")]
    spec = parse_spec((folder / "job.toml").read_text(encoding="utf-8"))
    assert spec.strategy.preset in ran.out  # what it said is what ran
    assert spec.job.nodes == len(spec.job.on)
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    # The lines that were measured are known to the next plan of the same hub.
    planned = atoll.run_here("plan", str(job), "--json")
    assert planned.code == 0, planned.both
    routes = {one["route"] for one in json.loads(planned.out)["candidates"]}
    assert routes == {"relay", "direct"}
