"""Where there are no namespaces the real round machine plays the rehearsal on virtual time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.fleet.faults import Fault
from atoll.forecast.predict import Planner
from atoll.netlab.lab import Lab
from atoll.rehearse.expected import expected
from atoll.rehearse.simulated import simulated
from atoll.rehearse.site import between
from tests.rehearse.plays import fleet, rehearsal

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "planning"


@pytest.mark.parametrize(
    "faults",
    [(), (Fault(what="kill", machine="m2", at_s=20.0, for_s=30.0),)],
    ids=["no fault", "killed"],
)
def test_simulated_members_are_as_fast_as_predicted(faults: tuple[Fault, ...]) -> None:
    plan, load = rehearsal(fleet(0.1, 0.1, 0.2, faults=faults), seconds=240.0)
    forecast = Planner(load).predict(plan.fleet, plan.candidate)
    predicted = expected(plan, load)
    seen = simulated(plan, forecast, elements=load.elements, expected_s=predicted.end.seconds)
    assert seen.end.steps == plan.steps
    assert seen.end.seconds == pytest.approx(predicted.end.seconds, rel=0.1)
    assert seen.end.sent_bytes == pytest.approx(predicted.end.sent_bytes, rel=0.15)


def test_without_namespaces_the_command_says_so_and_simulates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lab, "unavailable", staticmethod(lambda: "network namespaces need root"))
    words = [str(EXAMPLES / "small.toml"), "--machines", str(EXAMPLES / "faults.toml")]
    done = CliRunner().invoke(app, ["rehearse", *words, "--minutes", "2"])
    assert done.exit_code == 0, done.output
    assert "network namespaces need root" in done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("predicted ")
    assert "simulated" in done.stdout


def test_ways_between_machines_are_those_of_the_planner() -> None:
    known = fleet(0.1, 0.1, 0.1)
    a, b, c = known.machines
    assert between(known, a, b) is None  # both lines together, as the planner takes it
    apart = known.with_machines([a, b, dataclasses.replace(c, site="")])
    way = between(apart, a, apart.machines[2])
    assert way is not None
    assert way.apart
