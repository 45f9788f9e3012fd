"""Jobs that go well: real hub, nodes, workers and reducer, from the command to the files."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Atoll, ticket_of, until

pytestmark = pytest.mark.e2e


def test_three_commands_train_on_two_machines_and_collect_the_results(atoll: Atoll) -> None:
    hub = atoll.hub()
    ticket = ticket_of(hub)
    for name in ("kitchen", "attic"):
        atoll.join(ticket, name=name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
    done = atoll.run("run", str(atoll.job(route='"auto"')), "--runs", "fetched")
    assert done.code == 0, done.both
    assert "replicas identical  yes" in done.out
    (folder,) = (atoll.folder / "fetched").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"] == 2
    assert summary["rounds_committed"] >= 4
    assert summary["rounds_aborted"] == 0
    assert summary["replicas_identical"] is True
    assert summary["loss_final"] < summary["loss_first"]
    assert "<html" in (folder / "report.html").read_text()[:500].lower()
    assert (folder / "model.safetensors").stat().st_size > 1000
    with hub.client() as client:
        (view,) = client.jobs()
        assert {member["node"] for member in view["members"]} == {"kitchen", "attic"}
    written = atoll.run("generate", str(folder), "--prompt", "abc", "-n", "20", "--seed", "1")
    assert written.code == 0, written.both
    assert written.out.startswith("abc")
    (folder / "report.html").unlink()
    assert atoll.run("report", str(folder)).code == 0
    assert (folder / "report.html").exists()


def test_four_members_on_this_machine_all_contribute_to_every_round(atoll: Atoll) -> None:
    done = atoll.run("run", str(atoll.job(steps=30)), "--local", "4")
    assert done.code == 0, done.both
    folder = atoll.job_folder()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"] == 4
    assert summary["replicas_identical"] is True
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counts = {row["values"]["contributors"] for row in rows if "contributors" in row["values"]}
    assert counts == {4}
    assert {row["member"] for row in rows} == {"w0", "w1", "w2", "w3"}
    assert (folder / "checkpoints").is_dir()
    assert not atoll.processes()


def test_one_member_alone_needs_no_partner(atoll: Atoll) -> None:
    done = atoll.run("run", str(atoll.job(steps=20)), "--local", "1", "--outer", "alone")
    assert done.code == 0, done.both
    assert (atoll.job_folder() / "model.safetensors").exists()


@pytest.mark.parametrize("outer", ["average", "every_step"])
def test_every_outer_strategy_runs_from_the_command_line(atoll: Atoll, outer: str) -> None:
    every = ["--every", "5"] if outer == "average" else []
    job = atoll.job(steps=12)
    text = job.read_text().replace("every = 10", "")
    job.write_text(text)
    words = ["run", str(job), "--local", "2", "--outer", outer, "--codec", "fp32", *every]
    done = atoll.run(*words)
    assert done.code == 0, done.both
    summary = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert summary["strategy"] == {"inner": "local", "outer": outer, "codec": "fp32"}
    assert summary["replicas_identical"] is True
