"""A result that does not fit the plan, or peers whose values are of no use: refused by name."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import (
    DeadlineExceeded,
    EpochChanged,
    GroupError,
    PeerLost,
    PeerRefused,
    WireError,
)
from atoll.group.base import Work
from atoll.group.collectives.collectives import BoundedProcessGroup, Exchanged, weighted_mean
from atoll.group.period import PeriodReport
from atoll.group.routes.direct import DirectGroup, DirectRoute
from atoll.group.routes.hierarchical import reduce_by_sites
from atoll.group.routes.relay import RelayedMean, RelayExchange, decode_mean
from atoll.group.routes.requests import ReduceRequest
from atoll.hub.server import HubServer
from atoll.net.dispatcher import Relayed
from atoll.net.http.client import HubClient
from atoll.net.sync_link import SyncLink
from atoll.reducer.mean import Share
from atoll.wire.chunks import ChunkHead, pack_chunk, unpack_chunk
from atoll.wire.messages import RoundPlan
from tests.group.hub_world import HubWorld, NodeInName
from tests.group.meeting_place import direct_route
from tests.patience import PATIENCE_S, PROMPT_S

SIZE = 100


class ForgedWorld(HubWorld):
    """The reducer answers every contribution with a result of the test's making."""

    forge: dict[str, Any]
    value = 1.0

    def start_reducer(self) -> None:
        link = self.connect("reducer")
        inbox = link.subscribe(sources=None)

        def serve() -> None:
            while not self.stop.is_set():
                try:
                    item = inbox.receive(deadline=time.monotonic() + 0.2)
                except DeadlineExceeded:
                    continue
                if isinstance(item, Relayed):
                    self._answer(link, item)

        self.reducer_thread = Work.start(serve, name="forger")

    def _answer(self, link: SyncLink, item: Relayed) -> None:
        chunk, _ = unpack_chunk(item.payload)
        fields: dict[str, Any] = {
            "kind": "result", "epoch": chunk.epoch, "round": chunk.round, "index": 0, "count": 1,
            "total_bytes": 4 * SIZE, "codec": "fp32", "sizes": [SIZE], "weight": 2.0,
            "contributors": ["w0", "w1"],
        }  # fmt: skip
        head = ChunkHead(**{**fields, **self.forge})
        data = torch.full((max(0, head.total_bytes // 4),), self.value).numpy().tobytes()
        data = data.ljust(head.total_bytes, b"\0")
        deadline = time.monotonic() + PATIENCE_S
        link.relay(item.source, pack_chunk(head, data), deadline=deadline)


FORGED: dict[str, dict[str, Any]] = {
    "other sizes": {"sizes": [50, 50]},
    "another job's vector": {"sizes": [50], "total_bytes": 200},
    "another codec": {"codec": "bf16", "total_bytes": 200},
    "another round": {"round": 5},
    "a stranger": {"contributors": ["w0", "w9"]},
    "nobody": {"contributors": []},
    "wrong order": {"contributors": ["w1", "w0"]},
    "no weight": {"weight": 0.0},
    "weight NaN": {"weight": math.nan},
    "not finite": {"value": math.nan},
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_result_is_refused_by_name_and_told(
    node: NodeInName, hub: HubServer, what: str
) -> None:
    forge = dict(FORGED[what])
    here = ForgedWorld(node, 2, route="relay")
    here.value = forge.pop("value", 1.0)
    here.forge = forge

    def member(group: Any) -> str:
        group.join(PeriodReport(0, "base"))
        work = group.reduce([torch.ones(SIZE)], codec=make_codec("fp32"), weight=1.0)
        with pytest.raises((PeerRefused, EpochChanged)) as caught:  # the other was quicker
            work.wait(PATIENCE_S)
        group.commit(None, ok=False, reason=str(caught.value))
        return str(caught.value)

    reasons = here.run(member)
    assert any("result of a round" in str(reason) for reason in reasons), reasons
    with HubClient(hub.url, hub.operator_token) as client:
        deadline = time.monotonic() + PATIENCE_S
        kinds: list[str] = []
        while "result-refused" not in kinds:
            assert time.monotonic() < deadline
            kinds = [event["kind"] for event in client.events(here.job)["events"]]
    here.close()


def test_result_of_another_epoch_is_ignored(node: NodeInName) -> None:
    here = ForgedWorld(node, 2, route="relay")
    here.forge = {"epoch": 99}
    plans = here.run(lambda group: group.join(PeriodReport(0, "base")))
    plan = plans[0]
    assert isinstance(plan, RoundPlan)
    packet = make_codec("fp32").encode(torch.ones(SIZE), key="x")
    exchange = RelayExchange(
        here.links["w0"], plan, Share("w0", packet, 1.0), deadline=time.monotonic() + 1.0
    )
    with pytest.raises(DeadlineExceeded):
        exchange.run()
    here.close()


# ------------------------------------------------------------------- members among themselves


@pytest.fixture
def routes() -> Iterator[Callable[[int], list[DirectRoute]]]:
    made: list[DirectRoute] = []

    def make(n: int) -> list[DirectRoute]:
        made.extend(direct_route(f"w{i}") for i in range(n))
        return made

    yield make
    for route in made:
        route.close()


def together(
    routes: list[DirectRoute], work: Callable[[BoundedProcessGroup], Exchanged]
) -> list[Exchanged | BaseException]:
    members = tuple(f"w{i}" for i in range(len(routes)))
    deadline = time.monotonic() + PATIENCE_S
    meeting = DirectGroup(1, members, routes[0].dial, deadline)

    def member(route: DirectRoute) -> Exchanged:
        return route.meet(meeting, work, serial=route.begin())

    started = [Work.start(lambda r=r: member(r), name="member") for r in routes]  # type: ignore[misc]
    found: list[Exchanged | BaseException] = []
    for each in started:
        try:
            found.append(each.wait(PATIENCE_S))
        except BaseException as error:
            found.append(error)
    return found


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 1e300])
def test_impossible_weight_excludes_its_member_when_direct(
    routes: Callable[[int], list[DirectRoute]], codec: str, weight: float
) -> None:
    def work(wires: BoundedProcessGroup) -> Exchanged:
        own = weight if wires.rank == 1 else 1.0
        x = torch.full((3000,), float(wires.rank))
        return weighted_mean(wires, x, codec=make_codec(codec), weight=own, key="x")

    for found in together(routes(3), work):
        assert isinstance(found, Exchanged)
        assert found.contributors == ("w0", "w2")
        torch.testing.assert_close(found.vector, torch.ones(3000), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("codec", "weight"), [("fp32", -1.0), ("int8", -1.0), ("int8", 1e200)])
def test_member_that_lies_about_its_weight_is_refused(
    routes: Callable[[int], list[DirectRoute]],
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    weight: float,
) -> None:
    """A process that does not check itself: the others do, and try again on another route."""
    liar = threading.local()
    real = weighted_mean.__globals__["is_weight"]
    monkeypatch.setitem(
        weighted_mean.__globals__, "is_weight",
        lambda w: True if getattr(liar, "lies", False) else real(w),
    )  # fmt: skip

    def work(wires: BoundedProcessGroup) -> Exchanged:
        liar.lies = wires.rank == 1
        own = weight if wires.rank == 1 else 1.0
        x = torch.full((3000,), float(wires.rank))
        return weighted_mean(wires, x, codec=make_codec(codec), weight=own, key="x")

    first, _, last = together(routes(3), work)
    for error in (first, last):
        assert isinstance(error, PeerRefused), error
        assert "w1" in str(error)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_member_that_lies_about_its_values_is_refused(
    routes: Callable[[int], list[DirectRoute]], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    liar = threading.local()
    real = weighted_mean.__globals__["_survives"]
    monkeypatch.setitem(
        weighted_mean.__globals__, "_survives",
        lambda *arguments: True if getattr(liar, "lies", False) else real(*arguments),
    )  # fmt: skip

    def work(wires: BoundedProcessGroup) -> Exchanged:
        liar.lies = wires.rank == 1
        x = torch.full((3000,), math.inf if wires.rank == 1 else 1.0)
        return weighted_mean(wires, x, codec=make_codec(codec), weight=1.0, key="x")

    found = together(routes(3), work)
    assert all(isinstance(error, PeerRefused | PeerLost) for error in found), found
    assert any(isinstance(error, PeerRefused) for error in found)


# -------------------------------------------------------------------------------- by sites


def site_plan(routes: list[DirectRoute], **changes: Any) -> RoundPlan:
    members = [f"w{i}" for i in range(len(routes))]
    plan = RoundPlan(
        job="j", round=0, epoch=1, members=[*members, "w9"], route="hierarchical",
        reducer="j/reducer", timeout_s=PATIENCE_S, sites=[members, ["w9"]],
        stores=[routes[0].dial, ""],
    )  # fmt: skip
    return msgspec.structs.replace(plan, **changes)


def by_sites(
    routes: list[DirectRoute],
    upstairs: Callable[..., RelayedMean],
    *,
    codec: str = "fp32",
    value: float = 1.0,
    phase: int = 0,
) -> list[Exchanged | BaseException]:
    plan = site_plan(routes)

    def member(index: int) -> Exchanged:
        request = ReduceRequest(
            plan=plan, vector=torch.full((3000,), value), codec=make_codec(codec), weight=2.0,
            key="x", serial=routes[index].begin(), phase=phase,
        )  # fmt: skip
        return reduce_by_sites(request, me=f"w{index}", direct=routes[index], via_reducer=upstairs)

    work = [Work.start(lambda i=i: member(i), name="member") for i in range(len(routes))]  # type: ignore[misc]
    found: list[Exchanged | BaseException] = []
    for each in work:
        try:
            found.append(each.wait(PATIENCE_S))
        except BaseException as error:
            found.append(error)
    return found


@pytest.mark.parametrize("codec", ["fp32", "int8", "feedback(bf16)"])
def test_site_sends_its_mean_once_and_all_decode_the_same_bytes(
    routes: Callable[[int], list[DirectRoute]], codec: str
) -> None:
    sent: list[tuple[Packet, float, tuple[str, ...]]] = []

    def upstairs(packet: Packet, weight: float, names: tuple[str, ...]) -> RelayedMean:
        sent.append((packet, weight, names))
        answer = make_codec(packet.codec).encode(torch.full((3000,), 5.0), key="x")
        return RelayedMean(answer, ("w0", "w1", "w2", "w9"), 7.0, 10, 20)

    results = by_sites(routes(3), upstairs, codec=codec)
    assert len(sent) == 1
    packet, weight, names = sent[0]
    assert (weight, names) == (6.0, ("w0", "w1", "w2"))
    torch.testing.assert_close(
        make_codec(packet.codec).decode(packet), torch.ones(3000), atol=0.01, rtol=0.01
    )
    digests = set()
    for result in results:
        assert isinstance(result, Exchanged)
        assert result.contributors == ("w0", "w1", "w2", "w9")
        assert result.weight == 7.0
        torch.testing.assert_close(result.vector, torch.full((3000,), 5.0), atol=0.05, rtol=0.01)
        digests.add((result.digest, bytes(result.vector.numpy().tobytes())))
    assert len(digests) == 1


def test_site_whose_values_are_all_unusable_still_takes_part(
    routes: Callable[[int], list[DirectRoute]],
) -> None:
    def upstairs(packet: Packet, weight: float, names: tuple[str, ...]) -> RelayedMean:
        assert (weight, names) == (0.0, ())
        assert not make_codec(packet.codec).decode(packet).any()
        answer = make_codec("fp32").encode(torch.full((3000,), 5.0), key="x")
        return RelayedMean(answer, ("w9",), 7.0, 10, 20)

    for result in by_sites(routes(2), upstairs, value=math.nan):
        assert isinstance(result, Exchanged)
        assert result.contributors == ("w9",)


@pytest.mark.parametrize(
    ("trouble", "raised"),
    [
        (GroupError("your codec is another"), PeerLost),
        (PeerLost("the hub lost the reducer"), PeerLost),
        (WireError("nonsense"), PeerLost),
    ],
)
def test_site_hears_at_once_why_its_delegate_got_no_mean(
    routes: Callable[[int], list[DirectRoute]], trouble: GroupError, raised: type[GroupError]
) -> None:
    def upstairs(*_: Any) -> RelayedMean:
        raise trouble

    began = time.monotonic()
    first, *others = by_sites(routes(3), upstairs)
    assert type(first) is type(trouble)
    for error in others:
        assert isinstance(error, raised)
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize(
    "answer",
    [
        RelayedMean(make_codec("fp32").encode(torch.ones(3000), key="x"), ("w7",), 1.0, 0, 0),
        RelayedMean(make_codec("fp32").encode(torch.ones(3000), key="x"), ("w0",), -1.0, 0, 0),
        RelayedMean(make_codec("fp32").encode(torch.ones(2999), key="x"), ("w0",), 1.0, 0, 0),
        RelayedMean(
            make_codec("fp32").encode(torch.full((3000,), math.inf), key="x"), ("w0",), 1.0, 0, 0
        ),
    ],
)
def test_site_refuses_a_result_that_does_not_fit(
    routes: Callable[[int], list[DirectRoute]], answer: RelayedMean
) -> None:
    for error in by_sites(routes(2), lambda *_: answer):
        assert isinstance(error, PeerRefused), error


def test_later_exchange_of_a_plan_makes_no_new_connections(
    routes: Callable[[int], list[DirectRoute]],
) -> None:
    packet = make_codec("fp32").encode(torch.ones(3000), key="x")
    answer = RelayedMean(packet, ("w0", "w1"), 1.0, 0, 0)
    for error in by_sites(routes(2), lambda *_: answer, phase=1):
        assert isinstance(error, PeerLost), error


def test_a_small_result_that_names_terabytes_is_refused() -> None:
    head = np.array([1, 2**20, 2**20], dtype="<u4").tobytes()
    packet = Packet(head + bytes(2 * 4 * 2**20), "lowrank:1", (2**40,))
    with pytest.raises(PeerRefused, match="not usable"):
        decode_mean(RelayedMean(packet, ("w0",), 1.0, 0, 0), 3000, sent=0, received=0)


def test_member_without_a_site_is_refused(routes: Callable[[int], list[DirectRoute]]) -> None:
    (route,) = routes(1)
    with pytest.raises(WireError, match="no site"):
        reduce_by_sites(
            ReduceRequest(
                plan=site_plan([route], sites=[["w5"]]), vector=torch.ones(3),
                codec=make_codec("fp32"), weight=1.0, key="x", serial=route.begin(),
            ),
            me="w0", direct=route, via_reducer=lambda *_: pytest.fail("nobody to ask"),
        )  # fmt: skip
