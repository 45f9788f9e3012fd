"""Rules, collectives and outer strategies that are not DiLoCo, from the command to the files."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Atoll

pytestmark = pytest.mark.e2e


def run(atoll: Atoll, *lines: str, route: str, outer: tuple[str, ...]) -> dict[str, object]:
    """Return the summary of a run of three local members with more lines in [strategy]."""
    job = atoll.job(steps=15, route=f'"{route}"')
    text = job.read_text().replace("every = 10", "")
    job.write_text(text.replace("[strategy]\n", "\n".join(["[strategy]", *lines, ""])))
    done = atoll.run("run", str(job), "--local", "3", "--outer", *outer)
    assert done.code == 0, done.both
    summary: dict[str, object] = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert lines[0].replace(" = ", " ").replace('"', "") in " ".join(done.out.split())
    assert summary["replicas_identical"] is True
    assert summary["rounds_aborted"] == 0
    assert summary["loss_final"] < summary["loss_first"]  # type: ignore[operator]
    return summary


@pytest.mark.long(
    "tests/reducer/test_process_attacker.py::test_attacker_is_excluded_over_a_real_hub"
)
def test_a_robust_rule_and_a_filter_of_averages(atoll: Atoll) -> None:
    lines = ['aggregate = "geometric-median"', 'admission = "norms"']
    outer = ("average", "--every", "5")
    named = run(atoll, *lines, route="auto", outer=outer)["strategy"]
    assert isinstance(named, dict)
    assert named["outer"] == "average"
    assert named["aggregate"] == "geometric-median"
    assert named["admission"] == "norms"


@pytest.mark.long(
    "tests/group/collectives/test_collectives.py::test_rules_by_coordinate_work_without_a_reducer"
)
def test_a_collective_of_every_step(atoll: Atoll) -> None:
    lines = ['collective = "tree"', 'codec = "fp32"']
    named = run(atoll, *lines, route="direct", outer=("every_step",))["strategy"]
    assert isinstance(named, dict)
    assert (named["outer"], named["codec"]) == ("every_step", "fp32")
    assert named["collective"] == "tree"


def test_too_few_members_for_a_rule_are_refused(atoll: Atoll) -> None:
    job = atoll.job(steps=15)
    job.write_text(job.read_text().replace("[strategy]\n", '[strategy]\naggregate = "krum:1"\n'))
    done = atoll.run("run", str(job), "--local", "4")
    assert done.code == 2
    assert "krum:0 works with 4" in done.err
    atoll.assert_ended()
