"""What goes wrong with real processes is found and named, and what is well is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from atoll import __version__
from atoll.cli.hub_access import KnownHub, remember
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.wire.messages import Beat, NodeInfo
from tests.e2e.conftest import Atoll, ticket_of, until
from tests.hub.peer import Peer

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time
import torch
import atoll

FAULTS = {faults}

with atoll.join() as run:
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 64)
    fault = FAULTS.get(run.member, "")
    inner = torch.optim.SGD(model.parameters(), lr=0.0 if fault == "zeros" else 0.01)
    optimizer = run.wrap(model, inner, outer=atoll.Average(every=5))
    words = torch.Generator().manual_seed(run.slot)
    for step in range({steps}):
        if run.stopping:
            break
        x = torch.randn(8, 64, generator=words)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.15 if fault == "slow" else 0.03)
        optimizer.step()
        run.log(loss=loss, tokens=8)
"""

SPEC = """
[job]
name = "toy"
nodes = 3
min_nodes = 2
script = "train.py"
route = "relay"
[checkpoint]
every = 0
"""

NAMES = ("lap0", "lap1", "lap2")

OF_THE_MACHINE = {"memory-filling", "disk-filling"}
"""This machine may be short of them, whatever is tested."""

TOLERANCE = 0.25
"""Between a rate that was foretold and the one that was then measured, on a busy machine."""


@dataclass(frozen=True)
class Place:
    """Where a hub is, as far as a test client has to know."""

    port: int
    operator_token: str


@pytest.fixture
def hub(atoll: Atoll) -> Iterator[KnownHub]:
    """A hub that looks more often and believes sooner than in real life, and three machines."""
    alarm_intervals = AlarmIntervals(every_s=0.5, nodes_every=2, patience=0.25)
    options = HubOptions(
        data=atoll.folder / "data", jobs=atoll.runs, alarm_intervals=alarm_intervals
    )
    with HubServer(options) as server:
        known = KnownHub(server.url, server.operator_token, operator=True)
        remember(known, home=atoll.home)
        for name in NAMES:
            atoll.join(server.ticket, name=name)
        with known.client() as client:
            until(lambda: len(client.nodes()) == len(NAMES))
        yield known


def submit(client: HubClient, *, faults: dict[str, str], steps: int = 10_000) -> str:
    return client.submit(SPEC, files={"train.py": SCRIPT.format(faults=faults, steps=steps)})


def found_alarm(client: HubClient, kind: str) -> dict[str, Any]:
    """Return an open alarm of a kind, or nothing."""
    return next((a for a in client.alarms() if a["kind"] == kind), {})


@pytest.fixture
def wrong_clock(hub: KnownHub) -> Iterator[Peer]:
    """A fourth machine: a client that speaks only the wire."""
    with hub.client() as client:
        secret = parse_ticket(ticket_of(hub)).secret
        info = NodeInfo("lap9", "Linux", "3.11", __version__, slots=0)
        name, token, _ = client.join(secret, name="lap9", info=info)
    place = cast(Any, Place(int(hub.url.rpartition(":")[2]), hub.token))
    with Peer(place, name, token=token, info=info) as peer:
        yield peer


@pytest.mark.long(
    "tests/hub/alarms/test_watch.py::test_member_that_contributes_zeros_is_named_with_its_machine"
)
def test_zeros_slow_machine_and_wrong_clock_raise_alarms(hub: KnownHub, wrong_clock: Peer) -> None:
    with hub.client() as client:
        job = submit(client, faults={"w1": "zeros", "w2": "slow"})

        def told(kind: str) -> dict[str, Any]:
            wrong_clock.tell(Beat({}, time.time() + 300.0))
            return found_alarm(client, kind)

        nodes = until(lambda: {m["member"]: m["node"] for m in client.job(job)["members"]})
        skew = until(lambda: told("clock-skew"))
        assert skew["node"] == wrong_clock.session
        assert "300 s ahead" in skew["cause"]
        zeros = until(lambda: told("zero-contribution"))
        assert (zeros["member"], zeros["node"]) == ("w1", nodes["w1"])
        slow = until(lambda: told("straggler"))
        assert (slow["member"], slow["node"]) == ("w2", nodes["w2"])

        found = until(lambda: (w := client.worth(job))["rounds"] >= 10 and w)
        costs = next(n for n in found["nodes"] if n["node"] == nodes["w2"])
        assert costs["advice"] == "remove"
        assert costs["text"].startswith(f"remove {nodes['w2']}: without it the group would reach")
        assert {n["advice"] for n in found["nodes"] if n["node"] != nodes["w2"]} == {"keep"}
        foretold = found["tokens_per_s"] - costs["adds_tokens_per_s"]

        client.drain(nodes["w2"])

        def as_foretold() -> bool:
            """Return whether the group is as quick as was foretold; other work may disturb it."""
            after = client.worth(job)
            rate = after["tokens_per_s"]
            return (
                after["rounds"] >= 10
                and len(after["nodes"]) == 2
                and rate == pytest.approx(foretold, rel=TOLERANCE)
                and rate > 1.5 * found["tokens_per_s"]
            )

        until(as_foretold)
        until(lambda: not found_alarm(client, "straggler"))
        client.stop(job, grace_s=5.0)


@pytest.mark.long("tests/hub/alarms/test_loss_rules.py::test_noisy_learning_raises_no_alarm")
def test_runs_that_are_well_raise_no_alarm(atoll: Atoll, hub: KnownHub) -> None:
    """The built-in trainer and a script, with losses as noisy as batches of four and eight."""
    with hub.client() as client:
        tiny = client.submit(atoll.job(steps=100, nodes="3").read_text())
        until(lambda: client.job(tiny)["state"] == "done")
        job = submit(client, faults={}, steps=100)
        until(lambda: client.job(job)["state"] == "done")
        assert (atoll.runs / job / "rounds.json").exists()
        rows = client.alarms(all_=True)
        assert not [row for row in rows if row["kind"] not in OF_THE_MACHINE]
        assert client.worth(job)["text"].startswith("3 machines: ")
    assert atoll.run("alarms", "--all", "--hub", hub.url).code == 0
    said = atoll.run("worth", job, "--hub", hub.url)
    assert "a 4th node would add" in said.out
