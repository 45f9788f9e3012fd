"""The first round waits for no more than later ones: the members have met before it."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.group.hub import HubGroup
from atoll.group.hub_requests import HubRequests
from atoll.group.run_round import CommittedMean
from atoll.wire.messages import Message, Roster, RoundJoin, RoundVote
from tests.contracts.group_suite import assert_same_everywhere, one_round, together, values
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.patience import PATIENCE_S

MEMBERS = 4


def in_round(world: HubWorld) -> list[CommittedMean]:
    return together(world, lambda group: one_round(group, values(group.me, (1000,))))


class Counts:
    """Counts what members ask the hub, and the connections that they make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: Counter[type[Message]] = Counter()
        self.bodies: list[Message] = []
        self.connected = 0
        self._lock = threading.Lock()
        ask, connect = HubRequests._once, socket.create_connection

        def counted_ask(requests: HubRequests, body: Message, timeout_s: float) -> Message:
            with self._lock:
                self.requests[type(body)] += 1
                self.bodies.append(body)
            return ask(requests, body, timeout_s)

        def counted_connect(*args: Any, **options: Any) -> socket.socket:
            with self._lock:
                self.connected += 1
            return connect(*args, **options)

        monkeypatch.setattr(HubRequests, "_once", counted_ask)
        monkeypatch.setattr(socket, "create_connection", counted_connect)

    def of_round(self, world: HubWorld) -> tuple[dict[type[Message], int], int]:
        self.requests.clear()
        self.connected = 0
        assert_same_everywhere([done.reduced for done in in_round(world)])
        return dict(self.requests), self.connected


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        world = HubWorld(node, MEMBERS, route="auto")
        yield world
        world.close()
        node.link.close()


def wait_until_met(world: HubWorld) -> None:
    for group in world.groups:
        assert isinstance(group, HubGroup)
        group._peers.early.wait(PATIENCE_S)
        direct = group._routes._direct
        assert direct is not None
        assert direct._prepared is not None
        assert direct._prepared._ended.wait(PATIENCE_S)


def test_the_first_round_asks_no_more_than_later_ones(
    world: HubWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_met(world)
    counts = Counts(monkeypatch)
    first, later = counts.of_round(world), counts.of_round(world)
    assert first == later == ({RoundJoin: MEMBERS, RoundVote: MEMBERS}, 0)


def test_members_that_have_not_met_do_so_in_the_round(
    world: HubWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_met(world)
    for group in world.groups[1:]:
        direct = group._routes._direct
        assert direct is not None
        assert direct._prepared is not None
        direct._prepared.drop()  # as if it had found no time
        direct._prepared = None
        group._peers.forget()
    counts = Counts(monkeypatch)
    requests, connected = counts.of_round(world)
    assert requests[Roster] >= MEMBERS - 1
    assert connected > 0
    assert counts.of_round(world)[1] == 0


def test_the_plan_has_the_ring_of_the_measured_lines(world: HubWorld) -> None:
    wait_until_met(world)
    order = ["w0", "w2", "w1", "w3"]
    near = set(zip(order, (*order[1:], order[0]), strict=True))
    for group in world.groups:
        direct = group._routes._direct
        assert direct is not None
        assert sorted(direct.lines) == sorted({"w0", "w1", "w2", "w3"} - {group.me})
        direct.lines = {
            other: (0.001, 1e8) if (other, group.me) in near else (0.2, 1e6)
            for other in direct.lines
        }
    assert_same_everywhere([done.reduced for done in in_round(world)])
    for group in world.groups:
        assert group._plan is not None
        assert group._plan.ring == order
