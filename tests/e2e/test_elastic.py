"""Machines that come, go and differ: real hub, agents and workers; nobody tells anybody to wait."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.net.http.client import HubClient
from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until
from tests.patience import PATIENCE_S, PROMPT_S

pytestmark = pytest.mark.e2e


def kinds(client: HubClient, job: str) -> list[str]:
    return [event["kind"] for event in client.events(job)["events"]]


def values(client: HubClient, job: str, name: str) -> dict[str, list[float]]:
    """Return all measurements of one name, by member."""
    found: dict[str, list[float]] = {}
    for point in client.metrics(job)["points"]:
        if name in point["values"]:
            found.setdefault(point["member"], []).append(point["values"][name])
    return found


@contextlib.contextmanager
def throttled(process: psutil.Process, *, share: float) -> Iterator[None]:
    """Let a process run only a share of the time, as a slow machine would."""
    over = threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                process.suspend()
                over.wait(0.05 * (1 - share))
                process.resume()
                over.wait(0.05 * share)
        except psutil.NoSuchProcess:
            return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long("tests/group/test_elastic.py::test_pace_of_a_test_is_told_with_the_verdict")
def test_slow_machine_does_fewer_steps_per_round(atoll: Atoll) -> None:
    job = atoll.job(steps=3_500, every=100)
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="quick")
    atoll.join(ticket_of(hub), name="slow")
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
        name = client.submit(job.read_text())
        until(lambda: client.job(name)["committed_round"] >= 3)
        with throttled(atoll.worker("w1"), share=0.4):
            until(lambda: min(values(client, name, "pace").get("w1", [1.0])) < 0.8)
            until(lambda: client.job(name)["state"] == "done")
        paces = values(client, name, "pace")
        members = {m["member"]: m for m in client.job(name)["members"]}
    # The median: a single round of the quick one may be slow, too, on a busy machine.
    assert statistics.median(paces["w0"]) > 0.8, "the quick one does (nearly) all its steps"
    quick, slow = (members[m]["result"] for m in ("w0", "w1"))
    assert quick["steps"] == slow["steps"] == 3_500, "the schedule is the same for both"
    assert slow["tokens"] < quick["tokens"]
    assert quick["digests"] == slow["digests"]
    assert quick["digest"] == slow["digest"]
    assert slow["wasted_steps"] == 0


@pytest.mark.long("tests/group/test_elastic.py::test_paused_group_waits_and_continues_by_itself")
def test_run_pauses_below_its_minimum_and_continues(atoll: Atoll) -> None:
    # Far more steps than are needed: it is stopped when everything was seen.
    job = atoll.job(steps=ENDLESS, every=50, paced=True, nodes="{min = 2, max = 3}")
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="one")
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1)
        name = client.submit(job.read_text())
        until(lambda: client.job(name)["state"] == "waiting" and client.job(name)["reason"])
        second = atoll.join(ticket_of(hub), name="two")
        until(lambda: client.job(name)["committed_round"] >= 3)
        second.interrupt(signal.SIGTERM)
        began = time.monotonic()
        second.wait()
        assert time.monotonic() - began < PROMPT_S, "leaving is not held up by a round"
        until(lambda: "paused" in kinds(client, name) and client.job(name)["paused"])
        before = client.job(name)["committed_round"]
        atoll.join(ticket_of(hub), name="three")
        until(lambda: "unpaused" in kinds(client, name))
        until(lambda: client.job(name)["committed_round"] > before + 1)
        atoll.join(ticket_of(hub), name="four")
        until(lambda: kinds(client, name).count("recovered") >= 2)
        until(lambda: ALL in contributors(client, name, since=before))
        members = stop(client, name)
    results = [member["result"] for member in members]
    assert len({r["digest"] for r in results}) == len({r["digests"] for r in results}) == 1
    assert all(r["wasted_steps"] == 0 for r in results if r["member"] != "w0")


def test_killed_members_resume_and_leaver_is_replaced(
    atoll: Atoll,
) -> None:
    job = atoll.job(steps=ENDLESS, every=50)
    text = job.read_text().replace("[checkpoint]\nevery = 1", "[checkpoint]\nevery = 20")
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="both", slots=2)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1)
        name = client.submit(text)
        until(lambda: "checkpoint" in kinds(client, name))
        # The last checkpoint lies some rounds behind, and the next one is not near.
        until(lambda: 2 <= client.job(name)["committed_round"] % 20 <= 10)
        for process in atoll.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: "alarm:rewound" in kinds(client, name))
        last = client.rounds(name)["last"]
        until(lambda: ["w0", "w1"] in contributors(client, name, since=last))
        before = client.events(name)["events"]
        leaver = atoll.worker("w1")
        began = time.monotonic()
        leaver.terminate()
        leaver.wait(PATIENCE_S)
        assert time.monotonic() - began < PROMPT_S, "leaving is not held up by a round"
        until(lambda: "recovered" in kinds(client, name)[len(before) :])
        seen = client.job(name)["committed_round"]
        until(lambda: client.job(name)["committed_round"] > seen + 2)
        after = client.events(name)["events"][len(before) :]
        results = [member["result"] for member in stop(client, name)]
    assert sum(e["kind"] == "member-failed" and "SIGKILL" in e["text"] for e in before) == 2
    told = [event["kind"] for event in after if event["member"] == "w1"]
    assert told.index("member-leaving") < told.index("member-left") < told.index("recovered")
    assert len({r["digest"] for r in results}) == len({r["digests"] for r in results}) == 1
    assert len(results) == 2


SCRIPT = """
import time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
with atoll.join() as run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = run.wrap(model, optimizer, outer=atoll.DiLoCo(every=20))
    print("started at step", run.step, flush=True)
    while not run.stopping:
        time.sleep(0.005)  # the test waits for others, which need the processor
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.long("tests/e2e/test_elastic.py::test_killed_members_resume_and_leaver_is_replaced")
def test_script_outlives_the_death_of_all_its_members(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="both", slots=2)
    spec = """
        [job]
        script = "main.py"
        nodes = 2
        route = "relay"
        [checkpoint]
        every_s = 2
        """
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 1)
        name = client.submit(spec, files={"main.py": SCRIPT})
        until(lambda: "checkpoint" in kinds(client, name))
        for process in atoll.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: "alarm:rewound" in kinds(client, name))
        last = client.rounds(name)["last"]
        until(lambda: ["w0", "w1"] in contributors(client, name, since=last))
        events = client.events(name)["events"]
        results = [member["result"] for member in stop(client, name)]
    (text,) = {e["text"] for e in events if e["kind"] == "alarm:rewound"}
    assert int(text.rpartition(" ")[2]) > 0, text
    assert len({r["digest"] for r in results}) == 1


ALL = ["w0", "w1", "w2"]


def contributors(client: HubClient, job: str, *, since: int) -> list[list[str]]:
    """Return whose work is in each mean that was decided after an epoch."""
    return [row["contributors"] for row in client.rounds(job, after=since)["rounds"]]


def stop(client: HubClient, job: str) -> list[dict[str, Any]]:
    """Stop a job after its round; return its members with what they reported."""
    client.stop(job, grace_s=PATIENCE_S)
    until(lambda: client.job(job)["state"] == "stopped")
    members: list[dict[str, Any]] = client.job(job)["members"]
    return members


def _folder(atoll: Atoll) -> Path:
    until(lambda: atoll.runs.exists() and [p for p in atoll.runs.iterdir() if p.name[0] != "."])
    return atoll.job_folder()


def _text(path: Path) -> str:
    return path.read_text().replace(" ", "") if path.exists() else ""


@pytest.mark.long("tests/checkpoint/test_change.py::test_strategy_may_change_and_change_back")
def test_run_resumes_with_other_members_and_strategy(atoll: Atoll) -> None:
    # Far more steps than are needed: how many it does is said when it goes on.
    running = atoll.start(
        "run", str(atoll.job(steps=ENDLESS, every=25, paced=True)), "--local", "3"
    )
    folder = _folder(atoll)
    until(lambda: '"checkpoint"' in _text(folder / "events.jsonl"))
    running.interrupt()
    assert running.wait().code == 130
    refused = atoll.run("resume", str(folder), "--set", "model.width=32")
    assert refused.code == 2
    assert "[model]" in refused.err
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = 75 + max(json.loads(line)["step"] for line in lines)
    again = ("--nodes", "2", "--preset", "local-sgd", "--set", f"train.steps={steps}")
    done = atoll.run("resume", str(folder), *again)
    assert done.code == 0, done.both
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["strategy"]["outer"] == "average"
    assert (summary["nodes"], summary["steps"]) == (2, steps)
    assert "outer_lr" not in (folder / "job.toml").read_text()
    atoll.assert_ended()
