from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import EpochChanged, GroupError
from atoll.group.base import Group
from atoll.group.period import PeriodReport
from atoll.group.routes.relay import RelayExchange
from atoll.group.run_round import CommittedMean, CommittedRound, mean_exchange, run_round
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.reducer.mean import Share
from atoll.wire.chunks import ChunkHead, pack_chunk, pieces
from tests.contracts.all_to_all_suite import AllToAllSuite
from tests.contracts.group_suite import (
    Build,
    GroupSuite,
    assert_same_everywhere,
    one_round,
    together,
    values,
)
from tests.group.hub_world import HubWorld, NodeInName, start_hub
from tests.patience import PATIENCE_S

SIZE = 1_000_000
"""16 pieces in fp32."""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInName]:
    """The node of a hub that waits for members whose connection is lost."""
    folder = tmp_path_factory.mktemp("patient")
    with start_hub(folder, reconnect_grace_s=PATIENCE_S) as server:
        node = NodeInName(server)
        yield node
        node.link.close()


@pytest.fixture
def world(node: NodeInName) -> Iterator[Callable[..., HubWorld]]:
    worlds: list[HubWorld] = []

    def make(n: int, *, route: str, **options: Any) -> HubWorld:
        worlds.append(HubWorld(node, n, route=route, **options))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


@pytest.mark.every(2)
class TestRelay(GroupSuite, AllToAllSuite):
    @pytest.fixture
    def build(self, world: Callable[..., HubWorld]) -> Build:
        return lambda n, **options: world(n, route="relay", **options)


@pytest.mark.every(2)
class TestDirectOverHub(GroupSuite, AllToAllSuite):
    @pytest.fixture
    def build(self, world: Callable[..., HubWorld]) -> Build:
        return lambda n, **options: world(n, route="direct", **options)


def of_two_sites(world: Callable[..., HubWorld]) -> Build:
    sites = [("w0", "w2", "w4"), ("w1", "w3")]
    return lambda n, **options: world(n, route="auto", sites=sites, **options)


@pytest.mark.long("tests/group/test_hub_group.py::test_two_sites_keep_the_core_of_the_contract")
class TestHierarchical(GroupSuite, AllToAllSuite):
    @pytest.fixture
    def build(self, world: Callable[..., HubWorld]) -> Build:
        return of_two_sites(world)


def test_two_sites_keep_the_core_of_the_contract(world: Callable[..., HubWorld]) -> None:
    suite, build = TestHierarchical(), of_two_sites(world)
    suite.test_result_is_the_mean_over_the_weights_received(build, n=5, codec="int8")
    suite.test_lost_peer_does_not_change_the_mean_of_the_rest(build)
    suite.test_peer_lost_before_its_vote_does_not_undo_the_round(build)
    suite.test_a_message_for_all_reaches_all_bit_for_bit(build)


def big(group: Group) -> CommittedMean:
    return one_round(group, values(group.me, (SIZE,)))


@pytest.mark.parametrize("who", ["w1", "reducer"])
@pytest.mark.parametrize("after_bytes", [300_000, 3_000_000, 5_000_000])
@pytest.mark.every(5)
def test_broken_connection_resumes_with_what_is_missing(
    patient: NodeInName, who: str, after_bytes: int
) -> None:
    """Any member may lose its connection, at any time: the round goes on, with the same result."""
    with contextlib.closing(HubWorld(patient, 2, route="relay", proxied=[who])) as here:
        here.proxies[who].cut_after(after_bytes)
        results = together(here, big)
    assert [agreed.reduced.contributors for agreed in results] == [("w0", "w1")] * 2
    assert here.proxies[who].cuts == 1
    assert_same_everywhere([agreed.reduced for agreed in results])
    a, b = values("w0", (SIZE,))[0], values("w1", (SIZE,))[0]
    assert torch.equal(results[0].reduced.tensors[0], (a + b) / 2)
    assert results[0].attempts == 1


def test_member_lost_while_it_sends_is_left_out_of_every_piece(
    world: Callable[..., HubWorld],
) -> None:
    here = world(3, route="relay", proxied=["w2"])
    here.proxies["w2"].cut_after(2_000_000, forever=True)

    def member(group: Group) -> CommittedMean | None:
        if group.me != "w2":
            return big(group)
        plan = group.join(PeriodReport(0, "base"))
        work = group.reduce(values(group.me, (SIZE,)), codec=make_codec("fp32"), weight=9.0)
        here.proxies["w2"].was_cut.wait(PATIENCE_S)
        here.die(group)
        with pytest.raises(Exception):  # noqa: B017 -- whatever its dead link says
            work.wait(PATIENCE_S)
        assert plan.members == ["w0", "w1", "w2"]
        return None

    agreed = [result for result in together(here, member) if result is not None]
    assert_same_everywhere([one.reduced for one in agreed])
    a, b = values("w0", (SIZE,))[0], values("w1", (SIZE,))[0]
    assert agreed[0].reduced.contributors == ("w0", "w1")
    assert torch.equal(agreed[0].reduced.tensors[0], (a + b) / 2)
    assert agreed[0].attempts == 1


def test_the_mean_comes_down_while_the_rest_goes_up(world: Callable[..., HubWorld]) -> None:
    """A member that has yet to send its last piece: the others have most of the mean by then."""
    here = world(2, route="relay", proxied=["w0"])
    early: list[int] = []

    def member(group: Group) -> CommittedMean:
        plan, mine = group.join(PeriodReport(0, "base")), values(group.me, (SIZE,))
        if group.me == "w1":
            packet = make_codec("fp32").encode(mine[0], key="x")
            parts = list(pieces(packet.data))
            head = ChunkHead(
                kind="contribute", epoch=plan.epoch, round=plan.round, index=0, count=len(parts),
                total_bytes=len(packet.data), codec="fp32", sizes=[SIZE], weight=1.0,
            )  # fmt: skip
            deadline = time.monotonic() + PATIENCE_S
            for index, piece in enumerate(parts[:-1]):
                chunk = pack_chunk(msgspec.structs.replace(head, index=index), piece)
                here.links["w1"].relay(plan.reducer, chunk, deadline=deadline)
            while here.proxies["w0"].down_bytes < 3 * SIZE and time.monotonic() < deadline:
                time.sleep(0.01)
            early.append(here.proxies["w0"].down_bytes)
        return one_round(group, mine)

    results = together(here, member)
    assert early[0] >= 3 * SIZE
    assert here.proxies["w0"].down_bytes < 5 * SIZE, "nothing came twice"
    assert_same_everywhere([agreed.reduced for agreed in results])
    a, b = values("w0", (SIZE,))[0], values("w1", (SIZE,))[0]
    assert torch.equal(results[0].reduced.tensors[0], (a + b) / 2)
    assert results[0].attempts == 1


def test_lost_reducer_aborts_and_the_next_one_finishes_the_round(
    world: Callable[..., HubWorld],
) -> None:
    here = world(2, route="relay")

    def member(group: Group) -> CommittedMean:
        if group.me == "w1":
            group.join(PeriodReport(0, "base"))
            here.links.pop("reducer").close()
            here.start_reducer()
        return big(group)

    results = together(here, member)
    assert_same_everywhere([agreed.reduced for agreed in results])
    assert results[0].reduced.contributors == ("w0", "w1")


def test_slow_member_delays_nobody_elses_result(world: Callable[..., HubWorld]) -> None:
    """Its own result crawls until the others have theirs."""
    here = world(3, route="relay", proxied=["w2"])
    done: list[str] = []
    passed: list[int] = []
    proxy = here.proxies["w2"]

    def member(group: Group) -> CommittedMean:
        group.join(PeriodReport(0, "base"))
        if group.me == "w2":
            proxy.down_bps = 1_000_000.0  # half a minute for the result
            passed.append(proxy.down_bytes)
        reduced = group.reduce(
            values(group.me, (SIZE,)), codec=make_codec("fp32"), weight=1.0
        ).wait()
        done.append(group.me)
        if {"w0", "w1"} <= set(done):
            passed.append(proxy.down_bytes)
            proxy.down_bps = 0.0
        group.commit(reduced)
        return run_round(
            group,
            mean_exchange(group, [torch.ones(1)], codec=make_codec("fp32"), weight=1.0),
            PeriodReport(1, "b"),
        )

    together(here, member)
    assert done[2] == "w2"
    assert passed[1] - passed[0] < 0.75 * 4 * SIZE, "the others did not wait for its pieces"


def test_odd_codec_is_refused_and_the_others_go_on(world: Callable[..., HubWorld]) -> None:
    def member(group: Group) -> CommittedMean:
        return one_round(
            group, values(group.me, (999,)), codec="int8" if group.me == "w1" else "fp32"
        )

    first, odd, last = world(3, route="relay").run(member)
    assert isinstance(odd, GroupError)
    assert "int8:256" in str(odd)
    assert isinstance(first, CommittedRound)
    assert isinstance(last, CommittedRound)
    assert_same_everywhere([first.reduced, last.reduced])
    assert first.reduced.contributors == ("w0", "w2")


def test_epoch_that_the_reducer_does_not_know_is_an_error(world: Callable[..., HubWorld]) -> None:
    here = world(2, route="relay")
    plan = together(here, lambda group: group.join(PeriodReport(0, "base")))[0]
    wrong = msgspec.structs.replace(plan, epoch=plan.epoch + 7)
    packet = make_codec("fp32").encode(torch.ones(5), key="x")
    exchange = RelayExchange(
        here.links["w0"], wrong, Share("w0", packet, 1.0), deadline=time.monotonic() + PATIENCE_S
    )
    with pytest.raises(EpochChanged):
        exchange.run()


def test_pieces_cut_short_are_asked_for_again(world: Callable[..., HubWorld]) -> None:
    """Garbage from a member's session is dropped; its real contribution still counts."""
    here = world(2, route="relay")

    def member(group: Group) -> CommittedMean:
        plan = group.join(PeriodReport(0, "base"))
        if group.me == "w1":
            head = ChunkHead(
                kind="contribute", epoch=plan.epoch, round=0, index=0, count=1, total_bytes=400,
                codec="fp32", sizes=[100], weight=1.0,
            )  # fmt: skip
            deadline = time.monotonic() + PATIENCE_S
            for piece in (b"", b"short", bytes(401)):
                here.links["w1"].relay(plan.reducer, pack_chunk(head, piece), deadline=deadline)
            here.links["w1"].relay(plan.reducer, (b"\xff\xff", b""), deadline=deadline)
        return one_round(group, values(group.me, (100,)))

    results = together(here, member)
    assert results[0].reduced.contributors == ("w0", "w1")
    assert results[0].attempts == 1


def test_automatic_route_dials_when_everybody_can_be_reached(
    world: Callable[..., HubWorld],
) -> None:
    here = world(3, route="auto")

    def member(group: Group) -> list[str]:
        return [one_round(group, values(group.me, (100,))).plan.route for _ in range(3)]

    for routes in together(here, member):
        assert routes[-1] == "direct"


def test_people_are_told_whose_values_were_left_out(
    world: Callable[..., HubWorld], hub: HubServer
) -> None:
    here = world(2, route="relay")

    def member(group: Group) -> CommittedMean:
        bad = float("nan") if group.me == "w1" else 1.0
        return one_round(group, [torch.full((4,), bad)])

    assert together(here, member)[1].reduced.contributors == ("w0",)
    with HubClient(hub.url, hub.operator_token) as client:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            events = client.events(here.job)["events"]
            texts = [e["text"] for e in events if e["kind"] == "contribution-left-out"]
            if texts:
                break
    assert "w1" in texts[0]


def test_reducer_leaves_when_the_hub_stays_away(tmp_path: Path) -> None:
    with start_hub(tmp_path) as hub:
        node = NodeInName(hub)
        here = HubWorld(node, 2, route="relay", away_s=0.5)
        together(here, lambda group: one_round(group, [torch.ones(3)]))
    assert here.reducer_thread is not None
    here.reducer_thread.wait(PATIENCE_S)
    here.close()
    node.link.close()
