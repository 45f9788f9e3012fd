"""Verified jobs of real processes: honest members pass, those that cheat are named and evicted."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from atoll.net.http.client import HubClient
from tests.e2e.conftest import ENDLESS, Atoll, ticket_of, until, wait_for
from tests.e2e.verification.cheats import patched

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="stopped by signals of POSIX"),
]

JOB = """
[job]
name = "strangers"
nodes = {nodes}
route = "relay"
device = "cpu"
trust = "audit"
audit_share = 0.05
[model]
name = "tests.paced:calm_gpt"
layers = 1
width = 16
heads = 2
context = 16
dropout = 0.1
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 4
lr = 4e-3
warmup = 5
pace = "equal"
eval_tokens = 512
[strategy]
preset = "diloco"
codec = "int8"
every = 8
shared_steps = 0
warmup_steps = 0
admission = "norms"
"""


def job_of(atoll: Atoll, *, nodes: int) -> str:
    text, words = atoll.folder / "text.txt", random.Random(5)
    known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
    text.write_text(" ".join(words.choices(known, k=12_000)))
    return JOB.format(text=text, nodes=nodes, steps=ENDLESS)


def begin(
    atoll: Atoll, patch: pytest.MonkeyPatch, *, honest: int, cheats: Sequence[str] = ()
) -> tuple[HubClient, str]:
    """Start a job on an agent with honest members, and on one more per cheat; return its name."""
    hub = atoll.hub()
    ticket = ticket_of(hub)
    atoll.join(ticket, name="honest", slots=honest)
    for cheat in cheats:
        with patch.context() as for_this_one:
            for_this_one.setenv("PYTHONPATH", str(patched(atoll.folder, cheat)))
            atoll.join(ticket, name=cheat)
    client = hub.client()
    until(lambda: len(client.nodes()) == 1 + len(cheats))
    return client, client.submit(job_of(atoll, nodes=honest + len(cheats)))


def places(client: HubClient, job: str) -> dict[str, str]:
    """Return the node of every member, once all have one."""

    def look() -> dict[str, str] | None:
        found = {one["member"]: one["node"] for one in client.job(job)["members"]}
        return found if all(found.values()) else None

    found: dict[str, str] = until(look)
    return found


def members(client: HubClient, job: str) -> dict[str, Any]:
    found: dict[str, Any] = client.verification(job)["members"]
    return found


def strikes(client: HubClient, job: str) -> dict[str, list[str]]:
    return {name: one.get("strikes", []) for name, one in members(client, job).items()}


def evicted(client: HubClient, job: str) -> set[str]:
    return {name for name, one in members(client, job).items() if one.get("evicted")}


def are_out(client: HubClient, job: str, members: set[str], count: int) -> bool:
    return len(members & evicted(client, job)) >= count


def check_end(client: HubClient, job: str, *, left: set[str], gone: set[str]) -> None:
    """Those that are left train on together, and end with equal weights when they are stopped."""
    seen = client.rounds(job)["last"]
    until(lambda: client.rounds(job)["last"] > seen + 2)
    after = client.rounds(job, after=seen)["rounds"]
    trained = {name for one in after for name in one["contributors"]}
    assert left <= trained, after
    assert not gone & trained, after
    client.stop(job, grace_s=60.0)
    view = wait_for(client, job, "stopped", "done", "failed")
    assert view["state"] == "stopped", view
    ended = {one["member"]: one["result"] for one in view["members"] if one["result"]}
    assert left <= set(ended)
    assert len({ended[name]["digest"] for name in left}) == 1


@pytest.mark.long(
    "tests/verification/test_ledger.py::test_every_newcomer_is_checked_once_and_passes"
)
def test_honest_members_are_checked_and_pass(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    client, job = begin(atoll, monkeypatch, honest=3)
    with client:
        until(lambda: sum(one.get("passed", 0) > 0 for one in members(client, job).values()) == 3)
        check_end(client, job, left={"w0", "w1", "w2"}, gone=set())
        found = client.verification(job)
        kinds = {event["kind"] for event in client.events(job)["events"]}
    assert {one["result"] for one in found["settled"]} <= {"passed", "unchecked"}
    assert all(one["checker"] != one["member"] for one in found["settled"])
    assert "strike" not in kinds
    shown = json.loads(atoll.run("challenges", job, "--json").out)
    assert shown["members"] == found["members"]


@pytest.mark.long("tests/verification/test_ledger.py::test_cheats_are_evicted_within_20_rounds")
def test_who_cheats_is_named_and_evicted(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads other data, one sends the negative, one lies about others; two are honest."""
    client, job = begin(atoll, monkeypatch, honest=2, cheats=("data", "flip", "accuse"))
    with client:
        placed = places(client, job)
        where = {node: member for member, node in placed.items()}
        reader, liar, accuser = where["data"], where["flip"], where["accuse"]
        gone = {reader, liar, accuser}
        for count in (1, 2, 3):  # the checks of all of them wait for each other
            until(partial(are_out, client, job, gone, count))
        honest = set(placed) - gone
        check_end(client, job, left=honest, gone=gone)
        given = strikes(client, job)
        events = client.events(job)["events"]
        told = [event["text"] for event in events if event["kind"] == "alarm:evicted"]
        for name in gone:
            mine = [event["text"] for event in events if event.get("member") == name]
            assert sum("is not started again" in text for text in mine) == 1, mine
    assert gone == {text.split()[0] for text in told}
    assert {name: given[name] for name in honest} == {name: [] for name in honest}
    # Its process that computes again is not patched, and tells the truth about the first steps.
    assert all("contradict its own at step 2" in why for why in given[reader])
    assert all("the contribution is not the difference" in why for why in given[liar])
    lie = "falsely: step"
    assert all("it accused w" in why and lie in why for why in given[accuser])
