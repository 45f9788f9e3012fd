"""A hub that is killed, or lost with its folder, while a job is under way."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.hub_access import KnownHub, find
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from bench.kit.ports import free_port
from tests.e2e.conftest import Atoll, Running, ticket_of, until, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "operations.md"


def ready(atoll: Atoll, hub: Running) -> KnownHub:
    """Wait until a hub that was just started answers; return it."""

    def answers() -> KnownHub | None:
        assert hub.popen.poll() is None, hub.wait().both
        if not (atoll.home / "hubs.json").exists():
            return None
        known = find(home=atoll.home)
        try:
            with known.client(timeout_s=2.0) as client:
                client.health()
        except AtollError:  # also while its certificate is not there yet
            return None
        return known

    known: KnownHub = until(answers)
    return known


def local_steps(atoll: Atoll, job: str) -> dict[str, list[tuple[float, int]]]:
    """Return (time, step) of every point that each member wrote on its own disk."""
    found = {}
    for member in ("w0", "w1"):
        paths = list(atoll.folder.glob(f"n*/jobs/{job}/{member}/metrics.jsonl"))
        lines = paths[0].read_text().splitlines() if paths else []
        points = [json.loads(line) for line in lines]
        found[member] = [(point["time"], point["step"]) for point in points]
    return found


def last_step(points: list[tuple[float, int]]) -> int:
    return max((step for _, step in points), default=0)


def committed(client: HubClient, job: str) -> int:
    return int(client.job(job)["committed_round"])


def begin(atoll: Atoll, known: KnownHub, *, steps: int, every: int, calm: bool = False) -> str:
    """Join two machines and submit a paced job; return it when all have one start."""
    for name in ("n0", "n1"):
        atoll.join(ticket_of(known), name=name)
    with known.client() as client:
        until(lambda: len(client.nodes()) == 2)
        # Both from the first step to the last: with fewer a busy machine may end it with one.
        both = atoll.job(steps=steps, every=every, paced=True, nodes="{ min = 2, max = 2 }")
        text = both.read_text()
        job = client.submit(text.replace("paced:gpt", "paced:calm_gpt") if calm else text)
        until(lambda: committed(client, job) >= 2)  # all have the same start
    return job


def check_end(atoll: Atoll, known: KnownHub, job: str, *, steps: int, pids: set[int]) -> int:
    """Wait for the end, compare the replicas, see that no process was replaced; return rounds."""
    with known.client() as client:
        view: dict[str, Any] = wait_for(client, job, "done", "failed")
        assert view["state"] == "done", view
        results = [member["result"] for member in view["members"]]
        assert len({result["digest"] for result in results}) == 1
        assert len({result["digests"] for result in results}) == 1, "the same after every round"
        assert {result["steps"] for result in results}
        assert [member["attempt"] for member in view["members"]] == [1, 1], pids
        return int(view["committed_round"])


def worker_pids(atoll: Atoll) -> set[int]:
    """Return the process of every member, without what it has forked."""
    found = {process.pid: process for process in atoll.workers()}
    return {pid for pid, process in found.items() if process.ppid() not in found}


def test_workers_train_on_while_the_hub_is_dead(
    atoll: Atoll,
) -> None:
    words = ["hub", "--host", "127.0.0.1", "--port", str(free_port())]
    hub = atoll.start(*words)
    known = ready(atoll, hub)
    # The hub dies in the first period, which lasts for many points of the metrics, one a second: a
    # busy machine delays them. A member at the end of the period would wait for the hub.
    job = begin(atoll, known, steps=400, every=360, calm=True)
    pids = worker_pids(atoll)
    begun = {member: last_step(p) for member, p in local_steps(atoll, job).items()}
    until(
        lambda: all(last_step(p) > begun[member] for member, p in local_steps(atoll, job).items())
    )
    hub.popen.kill()
    hub.wait()
    at_kill = {member: last_step(p) for member, p in local_steps(atoll, job).items()}
    until(
        lambda: all(
            last_step(points) > at_kill[member]
            for member, points in local_steps(atoll, job).items()
        )
    )
    assert worker_pids(atoll) == pids
    ready(atoll, atoll.start(*words))
    rounds = check_end(atoll, known, job, steps=400, pids=pids)
    with known.client() as client:
        rows = client.rounds(job)["rounds"]
        done = [row["round"] for row in rows if row["committed"]]
        assert sorted(done) == list(range(rounds)), "each round is committed once"
        points = client.metrics(job)["points"]
        steps = [(p["member"], p["step"]) for p in points if "loss" in p["values"]]
        assert len(steps) == len(set(steps)), "each measurement is there once"


def commands(atoll: Atoll, port: int) -> list[list[str]]:
    """Return the commands of the chapter about restoring, for this test's folders."""
    chapter = GUIDE.read_text().split("## Restore")[1].split("\n## ")[0]
    lines = re.findall(r"^ {7}atoll (.*)$", chapter, re.MULTILINE)
    places = {
        "hub.example.org": "127.0.0.1",
        "7700": str(port),
        "/srv/atoll": str(atoll.folder / "srv"),
        "/mnt/backups": str(atoll.folder / "backups"),
    }
    for name, place in places.items():
        lines = [line.replace(name, place) for line in lines]
    return [shlex.split(line) for line in lines]


@pytest.mark.long(
    "tests/hub/storage/test_backup.py::test_peers_reopen_sessions_at_the_restored_hub"
)
def test_hub_whose_folder_is_lost_goes_on_from_its_backup(atoll: Atoll) -> None:
    start, backup, restore = commands(atoll, free_port())
    hub = atoll.start(*start)
    known = ready(atoll, hub)
    job = begin(atoll, known, steps=1_200, every=100)
    pids = worker_pids(atoll)
    folder = atoll.folder / "srv" / "runs" / job
    until(lambda: list(folder.glob("checkpoints/*/manifest.json")))
    taken = atoll.run(*backup)
    assert taken.code == 0, taken.both
    with known.client() as client:
        then = committed(client, job)
        until(lambda: committed(client, job) >= then + 2)
    hub.popen.kill()
    hub.wait()
    shutil.rmtree(atoll.folder / "srv")
    again = atoll.start(*restore)
    ready(atoll, again)
    check_end(atoll, known, job, steps=1_200, pids=pids)
    with known.client() as client:
        kinds = [e["kind"].removeprefix("alarm:") for e in client.events(job)["events"]]
        assert "restored" in kinds
        assert "adopted" in kinds, "the record was behind its members"
        assert "rewound" not in kinds
    database = sqlite3.connect(atoll.folder / "srv" / "hub" / "hub.sqlite")
    assert database.execute("SELECT count(*) FROM restored").fetchone() == (1,)
    database.close()


def test_machine_that_starts_before_its_hub_waits_for_it(atoll: Atoll) -> None:
    port = str(free_port())
    serve = ("hub", "--host", "127.0.0.1", "--port", port)
    first = atoll.start(*serve)
    ticket = ticket_of(ready(atoll, first))
    node = atoll.join(ticket, name="n0")
    with find(home=atoll.home).client() as client:
        until(lambda: client.nodes() and client.nodes()[0]["state"] == "online")
    for process in (first, node):
        process.popen.kill()
        process.popen.wait()
    again = atoll.join(ticket, name="n0")
    with pytest.raises(subprocess.TimeoutExpired):  # a power cut: the hub takes longer to start
        again.popen.wait(timeout=4.0)
    known = ready(atoll, atoll.start(*serve))
    with known.client() as client:
        until(lambda: [n["state"] for n in client.nodes()] == ["online"])
