"""All-to-all over connections that break, and many in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atoll.group.base import AllToAllResult, Group, PeerMessage
from atoll.group.period import PeriodReport
from atoll.group.run_round import run_round
from atoll.hub.server import HubServer
from tests.contracts.all_to_all_suite import all_to_all_once, mine, packet_of, vector_in
from tests.contracts.group_suite import together
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.patience import PATIENCE_S

SIZE = 1_000_000
"""16 pieces in fp32."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with start_hub(folder, reconnect_grace_s=PATIENCE_S) as server:
        yield server


@pytest.fixture
def world(node: NodeInName) -> Iterator[Callable[..., HubWorld]]:
    worlds: list[HubWorld] = []

    def make(n: int, *, route: str, **options: Any) -> HubWorld:
        worlds.append(HubWorld(node, n, route=route, **options))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


def to_the_other(group: Group) -> AllToAllResult:
    other = {"w0": "w1", "w1": "w0"}[group.me]
    return all_to_all_once(group, [PeerMessage((other,), packet_of(mine(group.me, SIZE)))]).reduced


@pytest.mark.parametrize("who", ["w1", "reducer"])
@pytest.mark.parametrize("after_bytes", [300_000, 5_000_000])
@pytest.mark.every(3)
def test_broken_connection_resumes_with_what_is_missing(
    world: Callable[..., HubWorld], who: str, after_bytes: int
) -> None:
    here = world(2, route="relay", proxied=[who])
    here.proxies[who].cut_after(after_bytes)
    results = together(here, to_the_other)
    assert here.proxies[who].cuts == 1
    assert results[0].digest == results[1].digest
    assert torch.equal(vector_in(results[0].packets["w1"][0]), mine("w1", SIZE))
    assert torch.equal(vector_in(results[1].packets["w0"][0]), mine("w0", SIZE))


@pytest.mark.parametrize("route", ["relay", "direct"])
def test_rounds_of_all_to_alls_follow_each_other(
    world: Callable[..., HubWorld], route: str
) -> None:
    """With partners that change, and three exchanges in each round."""
    here = world(3, route=route)

    def member(group: Group) -> list[float]:
        seen: list[float] = []
        me = int(group.me[1:])
        for round_ in range(4):

            def exchange(_: object, round_: int = round_) -> AllToAllResult:
                for step in range(3):
                    to = f"w{(me + 1 + (round_ + step) % 2) % 3}"
                    value = torch.tensor([100.0 * round_ + 10 * step + me])
                    got = group.all_to_all([PeerMessage((to,), packet_of(value))]).wait()
                seen.extend(float(vector_in(p)) for (p,) in got.packets.values())
                return got

            run_round(group, exchange, PeriodReport(round_, "base"))
        return seen

    assert together(here, member) == [expected(slot) for slot in range(3)]


def expected(slot: int) -> list[float]:
    """Return what reaches a member in the last exchange of each round."""
    found = []
    for round_ in range(4):
        distance = 1 + (round_ + 2) % 2
        found.append(100.0 * round_ + 20 + (slot - distance) % 3)
    return found
