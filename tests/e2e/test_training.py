"""Jobs that go well: real hub, nodes, workers and reducer, from the command to the files."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Atoll, ticket_of, until

pytestmark = pytest.mark.e2e


def test_three_commands_train_and_collect_the_results(atoll: Atoll) -> None:
    hub = atoll.hub()
    ticket = ticket_of(hub)
    for name in ("kitchen", "attic"):
        atoll.join(ticket, name=name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
    done = atoll.run(
        "run", str(atoll.job(route='"auto"', nodes="{ min = 2, max = 2 }")), "--runs", "fetched"
    )
    assert done.code == 0, done.both
    assert "replicas identical  yes" in done.out
    (folder,) = (atoll.folder / "fetched").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"] == 2
    assert summary["rounds_committed"] >= 4
    assert summary["replicas_identical"] is True
    assert summary["loss_final"] < summary["loss_first"]
    assert "<html" in (folder / "report.html").read_text()[:500].lower()
    assert (folder / "model.safetensors").stat().st_size > 1000
    with hub.client() as client:
        (view,) = client.jobs()
        assert {member["node"] for member in view["members"]} == {"kitchen", "attic"}
        counted = {member["node"]: member["sent_bytes"] for member in view["members"]}
        assert {member["node"]: member["sent_bytes"] for member in summary["members"]} == counted
        assert {m["node"]: m["result"]["sent_bytes"] for m in view["members"]} == counted
        assert {node["node"]: node["sent_bytes"] for node in client.nodes()} == counted
        assert view["sent_bytes"] == sum(counted.values()) > 0
        assert summary["bytes_sent_per_node"] == round(view["sent_bytes"] / 2)
    written = atoll.run_here("generate", str(folder), "--prompt", "abc", "-n", "20", "--seed", "1")
    assert written.code == 0, written.both
    assert written.out.startswith("abc")
    (folder / "report.html").unlink()
    assert atoll.run_here("report", str(folder)).code == 0
    assert (folder / "report.html").exists()


@pytest.mark.long(
    "tests/train/test_trainer.py::test_alone_needs_no_hub_and_a_stop_keeps_what_was_trained"
)
def test_one_member_alone_needs_no_partner(atoll: Atoll) -> None:
    done = atoll.run("run", str(atoll.job(steps=20)), "--local", "1", "--outer", "alone")
    assert done.code == 0, done.both
    assert (atoll.job_folder() / "model.safetensors").exists()
