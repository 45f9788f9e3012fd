"""Every member is killed in turn, and the hub: nothing counts twice, nothing stands still."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

from atoll.cli.hub_access import KnownHub
from atoll.net.http.client import HubClient
from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until, wait_for
from tests.e2e.paths.test_paths import events_of, job_of, step_of
from tests.e2e.swarm.test_runs import answers
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

MEMBERS = ["w0", "w1", "w2", "w3"]
EVERY, COMPARED = 20, 200
"""Steps of a phase, and steps at which losses are compared."""
NEAR = 0.1
"""Nats: a few phases in which one path of four is missing cost less."""


@pytest.mark.long(
    "tests/paths/test_ledger_faults.py::test_no_path_counts_twice_or_is_lost_in_silence"
)
def test_members_and_hub_are_killed_in_turn(atoll: Atoll) -> None:
    known = atoll.hub()
    with known.client() as client:
        until(lambda: answers(client))
        atoll.join(ticket_of(known), name="n0", slots=4)
        until(client.nodes)
        calm = begin(atoll, client)
        end(client, calm)
        job = begin(atoll, client)
        for number, member in enumerate(MEMBERS):
            kill(atoll, client, job, member, steps=(number + 1) * 30)
            if number == 1:
                restart_hub(atoll, client, known)
        end(client, job)
        check_counts(atoll, client, job, killed=MEMBERS)
        check_holders(client, job)
        assert abs(loss_at(client, job) - loss_at(client, calm)) < NEAR


def begin(atoll: Atoll, client: HubClient) -> str:
    text = job_of(atoll, steps=ENDLESS, every=EVERY, save=2)
    text = text.replace("eval_tokens", "eval_every = 5\neval_tokens")
    job = client.submit(text)
    until(lambda: step_of(client, job) >= EVERY)
    return job


def end(client: HubClient, job: str) -> None:
    """Stop a job that has come as far as losses are compared."""
    until(lambda: step_of(client, job) > COMPARED + EVERY)
    client.stop(job, grace_s=PATIENCE_S)
    assert wait_for(client, job, "stopped", "failed", "done")["state"] == "stopped"


def kill(atoll: Atoll, client: HubClient, job: str, member: str, *, steps: int) -> None:
    """Kill a member in whatever it does; the others go on, and later it does, too."""
    until(lambda: step_of(client, job) >= steps)
    before = step_of(client, job)
    atoll.worker(member).kill()
    until(lambda: step_of(client, job) > before + EVERY)

    def is_back() -> bool:
        view = next(m for m in client.job(job)["members"] if m["member"] == member)
        return view["attempt"] > 1 and int(view["step"] or 0) > before + EVERY

    until(is_back)


def restart_hub(atoll: Atoll, client: HubClient, known: KnownHub) -> None:
    for process in atoll.running("hub"):
        process.kill()
    port = known.url.rpartition(":")[2].strip("/")
    atoll.start("hub", "--host", "127.0.0.1", "--port", port)
    until(lambda: answers(client))


def check_counts(atoll: Atoll, client: HubClient, job: str, *, killed: list[str]) -> None:
    """A module has one round per phase, and what is missing in one is written down."""
    record: dict[str, Any] = json.loads((atoll.runs / job / "paths.json").read_text())
    missed: dict[str, dict[str, str]] = record["missed"]
    lost = {member for paths in missed.values() for member in paths.values()}
    assert lost <= set(killed)
    events = client.events(job)["events"]
    told = " ".join(event["text"] for event in events if event["kind"] == "path-missed")
    assert all(
        f"{path} of {member}" in told for ps in missed.values() for path, member in ps.items()
    )
    gone = {e["member"] for e in events if e["kind"] in ("member-failed", "member-lost")}
    assert gone == set(killed)
    rounds = [row for row in client.rounds(job)["rounds"] if row["committed"]]
    by_module: dict[int, list[int]] = {}
    for row in rounds:
        by_module.setdefault(row["epoch"] % 4, []).append(row["round"])
    assert sorted(by_module) == [0, 1, 2, 3]
    for module, numbers in by_module.items():
        assert max(Counter(numbers).values()) == 1, (module, numbers)
        assert len(numbers) <= record["phase"]
        assert len(numbers) >= record["phase"] - len(missed), (module, missed)


def check_holders(client: HubClient, job: str) -> None:
    """All that hold a module hold the same bits, at every round and at the end."""
    digests: dict[str, set[str]] = {}
    for member in client.job(job)["members"]:
        for module, digest in (member["result"] or {}).get("modules", {}).items():
            digests.setdefault(module, set()).add(digest)
    assert len(digests) == 4
    assert all(len(found) == 1 for found in digests.values()), digests
    kinds = set(events_of(client, job))
    assert not kinds & {"alarm:replica-differs", "alarm:result-differs", "alarm:rewound"}


def loss_at(client: HubClient, job: str) -> float:
    """Return the mean held-out loss of the paths at the step of comparison."""
    sums = [0.0, 0.0]
    for point in client.metrics(job)["points"]:
        if point["step"] == COMPARED and point["values"].get("held_out_tokens"):
            sums[0] += point["values"]["held_out_loss_sum"]
            sums[1] += point["values"]["held_out_tokens"]
    return sums[0] / sums[1]
