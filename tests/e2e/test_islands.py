"""Two islands of two ranks train together: ranks die, jobs stop and go on, nothing is left over."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.net.http.client import HubClient
from atoll.node.islands.restart_history import STEADY_S
from atoll.plan.pipelines import PLANS_FILE, PipelinePlan, read_plans, write_plans
from tests.e2e.conftest import ENDLESS, Atoll, lines_until, ticket_of, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

START_S = 2 * PATIENCE_S
"""How long a rank may take to be there: loading torch is slow on a busy machine."""


def islands(atoll: Atoll, *, every: int, **island: str) -> Path:
    """Write a small job without an end whose members are islands of two ranks."""
    path = atoll.job(steps=ENDLESS, every=every, paced=True)
    trusted = {"encryption": '"off"'} if "machines" in island else {}
    lines = [f"{key} = {value}" for key, value in {"ranks": "2", **trusted, **island}.items()]
    text = path.read_text().replace("[strategy]", '[strategy]\ninner = "fsdp"')
    text = text.replace("[checkpoint]\nevery = 1", "[checkpoint]\nevery = 5")
    path.write_text("\n".join([text, "[island]", *lines]))
    return path


def ranks(atoll: Atoll, member: str) -> dict[int, psutil.Process]:
    """Return the ranks of an island that live; its supervisor is none."""
    found = {}
    for process in atoll.workers():
        try:
            variables = process.environ()
        except psutil.NoSuchProcess:
            continue
        if variables["ATOLL_MEMBER"] == member and variables.get("ATOLL_SUPERVISED"):
            found[int(variables["RANK"])] = process
    return found


def kinds(client: HubClient, job: str) -> list[str]:
    return [event["kind"] for event in client.events(job)["events"]]


def contributors(client: HubClient, job: str, *, since: int) -> list[list[str]]:
    return [row["contributors"] for row in client.rounds(job, after=since)["rounds"]]


def kill_and_await_return(atoll: Atoll, client: HubClient, job: str, *, rank: int) -> float:
    """Kill a rank of w1; w0 goes on alone meanwhile, then w1 is back with the common state.

    Returns:
        How long the ranks that were killed had been there, in seconds.
    """
    back, before = kinds(client, job).count("recovered"), client.rounds(job)["last"]
    mine = ranks(atoll, "w1")
    lived_s = time.time() - mine[rank].create_time()
    mine[rank].kill()
    psutil.wait_procs(mine.values(), timeout=PATIENCE_S)
    assert not any(process.is_running() for process in mine.values()), "all end, not only one"
    until(lambda: ["w0"] in contributors(client, job, since=before), timeout_s=START_S)
    until(lambda: kinds(client, job).count("recovered") > back, timeout_s=START_S)
    seen = client.rounds(job)["last"]
    until(lambda: ["w0", "w1"] in contributors(client, job, since=seen), timeout_s=START_S)
    lines_until(client, job, f"rank {rank} of the 2 of w1 was killed")
    return lived_s


def stop(client: HubClient, job: str) -> list[dict[str, Any]]:
    """Stop a job after its round; return what its members reported."""
    client.stop(job, grace_s=PATIENCE_S)
    until(lambda: client.job(job)["state"] == "stopped", timeout_s=START_S)
    return [member["result"] for member in client.job(job)["members"]]


@pytest.mark.long(
    "tests/e2e/test_mesh_products.py::test_pipeline_and_tensor_train_what_one_process_does"
)
def test_two_ranks_train_as_one_member(atoll: Atoll) -> None:
    job = islands(atoll, every=5)
    words = ("--set", "train.steps=10", "--set", "job.nodes=1")
    done = atoll.run("run", str(job), "--local", "1", *words)
    assert done.code == 0, done.both
    summary = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert (summary["steps"], summary["strategy"]["inner"]) == (10, "fsdp")
    atoll.assert_ended()


@pytest.mark.long(
    "tests/island/test_killed_anywhere.py::test_the_others_commit_and_the_island_comes_back"
)
@pytest.mark.parametrize(("victim", "on_loss", "sizes"), [(0, "wait", [2]), (1, "shrink", [2, 1])])
def test_island_with_a_killed_rank_forms_anew(
    atoll: Atoll, victim: int, on_loss: str, sizes: list[int]
) -> None:
    job = islands(atoll, every=20, on_loss=f'"{on_loss}"')
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="both", slots=2)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1, timeout_s=START_S)
        name = client.submit(job.read_text())
        assert client.job(name)["island"] == "shard=2"
        until(lambda: ["w0", "w1"] in contributors(client, name, since=-1), timeout_s=START_S)
        for size in sizes:
            lived_s = kill_and_await_return(atoll, client, name, rank=victim)
            while len(ranks(atoll, "w1")) != size:  # only where a start was so slow as to be well
                assert lived_s > 0.8 * STEADY_S, "it is to start with a rank less"
                lived_s = kill_and_await_return(atoll, client, name, rank=victim)
        results = stop(client, name)
        until(lambda: not atoll.workers())
    assert len(results) == 2
    assert len({result["digest"] for result in results}) == 1
    assert len({result["digests"] for result in results}) == 1


@pytest.mark.long(
    "tests/island/trainer/test_trainer.py::test_a_pipeline_that_morphs_keeps_its_loss_curve"
)
def test_elastic_pipeline_morphs_when_ranks_are_killed(atoll: Atoll) -> None:
    path = islands(atoll, every=20, elastic="true")
    text = path.read_text().replace('inner = "fsdp"', 'inner = "pipeline"')
    text = text.replace("nodes = 2", "nodes = 1").replace("every = 5", "every = 1")
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="box")
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1, timeout_s=START_S)
        name = client.submit(text)
        until(lambda: kinds(client, name).count("checkpoint") > 1, timeout_s=2 * START_S)
        (plans,) = (atoll.folder / "box").rglob(PLANS_FILE)
        assert set(read_plans(plans.parent)) == {1, 2}, "it was planned for all that may be left"
        # What is fastest depends on the machine: from here on plans whose shapes differ.
        write_plans({2: plan_of(stages=2), 1: plan_of(stages=1)}, plans.parent)
        for victim, size in ((0, 2), (1, 1)):
            mine = ranks(atoll, "w0")
            lived_s = time.time() - mine[victim].create_time()
            mine[victim].kill()
            psutil.wait_procs([mine[victim]], timeout=PATIENCE_S)
            begun = time.monotonic()
            await_rounds(client, name, since=client.rounds(name)["last"])
            print(f"rank {victim}: {time.monotonic() - begun:.1f} s to the next rounds")
            assert len(ranks(atoll, "w0")) == size or (size == 1 and lived_s > 0.8 * STEADY_S)
            # Rank 0 keeps its process if it lives, and with it the session of the member.
            assert (ranks(atoll, "w0")[0].pid == mine[0].pid) == (victim == 1)
            assert kinds(client, name).count("morphed") == victim
            assert kinds(client, name).count("member-failed") == 1
        stop(client, name)
        until(lambda: not atoll.workers())


def await_rounds(client: HubClient, job: str, *, since: int) -> None:
    until(lambda: client.rounds(job)["last"] > since + 2, timeout_s=2 * START_S)


def plan_of(*, stages: int) -> PipelinePlan:
    return PipelinePlan(
        stages=stages, replicas=1, rows=1, microbatches=2, cuts=(2,)[: stages - 1],
        predicted_s=1.0, reduce_s=0.0, worst_bytes=0,
    )  # fmt: skip


@pytest.mark.long(
    "tests/island/trainer/test_trainer.py::test_a_run_goes_on_under_other_meshes_and_in_one_process"
)
def test_stopped_island_job_resumes_in_another_mesh(
    atoll: Atoll,
) -> None:
    running = atoll.start("run", str(islands(atoll, every=5)), "--local", "1")
    until(lambda: list(atoll.runs.glob("tiny-*/events.jsonl")), timeout_s=START_S)
    folder = atoll.job_folder()
    events = folder / "events.jsonl"
    until(lambda: "checkpoint" in events.read_text(), timeout_s=START_S)
    running.interrupt()
    assert running.wait(timeout_s=START_S).code == 130
    atoll.assert_ended()
    step = 50 + max(
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    )
    again = ("--set", "strategy.inner=tensor", "--set", f"train.steps={step}")
    done = atoll.run("resume", str(folder), *again, timeout_s=2 * START_S)
    assert done.code == 0, done.both
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["strategy"]["inner"]) == (step, "tensor")
    atoll.assert_ended()


@pytest.mark.long(
    "tests/node/islands/test_rank_supervisor.py::test_a_rank_that_stays_away_at_the_start_is_named"
)
def test_a_rank_that_does_not_begin_is_named(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="box")
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1, timeout_s=START_S)
        text = islands(atoll, every=20, timeout_s="10").read_text()
        name = client.submit(text.replace("nodes = 2", "nodes = 1"))
        until(lambda: 1 in ranks(atoll, "w0"), timeout_s=START_S)
        ranks(atoll, "w0")[1].suspend()
        failed = until(lambda: "member-failed" in kinds(client, name), timeout_s=START_S)
        assert failed
        events = client.events(name)["events"]
        (told,) = [event["text"] for event in events if event["kind"] == "member-failed"][:1]
        assert "rank 1 is behind" in told
        assert "rank 0: meeting the other ranks" in told
        assert "rank 1: loading" in told
        stop(client, name)
