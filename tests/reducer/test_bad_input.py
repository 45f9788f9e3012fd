"""Whatever one member sends, the others get the mean of what is usable, and people get a notice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.net.dispatcher import Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.server import Reducer
from atoll.wire.chunks import ChunkHead, count_pieces, pack_chunk, pieces, unpack_chunk
from atoll.wire.messages import Event, MemberLost, Message, RoundPlan, Verdict
from tests.patience import PATIENCE_S
from tests.tiers import examples

JOB = "job"
ELEMENTS = 70_000
"""Two pieces in fp32."""
EPOCH, ROUND = 7, 3
HEALTHY = ["w1", "w2", "w3"]
BAD = "w0"


class Desk:
    """Stands in for the reducer's session: keeps what it says, by member."""

    connected = True

    def __init__(self) -> None:
        self.said: dict[str, list[tuple[ChunkHead, bytes]]] = {}
        self.events: list[Event] = []

    def subscribe(self, **_: Any) -> Any:
        return None

    def notify(self, body: Message) -> None:
        assert isinstance(body, Event)
        self.events.append(body)

    def relay_later(self, to: str, parts: Iterator[Any], *, deadline: float) -> Future[int]:
        for head, piece in parts:
            chunk_head, data = unpack_chunk(memoryview(bytes(head) + bytes(piece)))
            self.said.setdefault(to.rpartition("/")[2], []).append((chunk_head, bytes(data)))
        done: Future[int] = Future()
        done.set_result(0)
        return done


class Bench:
    """One reducer with one open epoch."""

    def __init__(self, plan: RoundPlan) -> None:
        self.endpoint, self.plan = Desk(), plan
        self.reducer = Reducer(cast(SyncLink, self.endpoint), job=JOB)
        self.reducer._handle(plan)

    def send(self, member: str, head: ChunkHead, piece: Any = b"") -> None:
        packed, data = pack_chunk(head, piece)
        self.raw(member, packed + bytes(data))

    def raw(self, member: str, payload: bytes) -> None:
        self.reducer._handle(Relayed(f"{JOB}/{member}", memoryview(payload)))

    def contribute(self, member: str, vector: Tensor, **changes: Any) -> None:
        packet = make_codec("fp32").encode(vector, key="x")
        for index, piece in enumerate(pieces(packet.data)):
            self.send(member, head_of(packet, index=index, **changes), piece)

    def result(self, member: str) -> tuple[Tensor, list[str]] | None:
        """Return what a member was sent, once the sum is done."""
        self.reducer._summing.submit(lambda: None).result(PATIENCE_S)
        said = self.endpoint.said.get(member, [])
        found = {h.index: (h, p) for h, p in said if h.kind == "result"}
        if not found:
            return None
        head, _ = next(iter(found.values()))
        facts = (head.contributors, head.weight)
        for early, piece in said:  # what went out before, if it is of the same mean
            if early.kind == "early" and (early.contributors, early.weight) == facts:
                found.setdefault(early.index, (early, piece))
        data = b"".join(found[index][1] for index in sorted(found))
        packet = Packet(data, head.codec, tuple(head.sizes))
        return make_codec(head.codec).decode(packet), head.contributors

    def refused(self, member: str) -> list[str]:
        """Return the reasons that people received about a member."""
        return [e.text for e in self.endpoint.events if e.fields.get("member") == member]

    def close(self) -> None:
        self.reducer._summing.shutdown(wait=True)


def head_of(packet: Packet, **changes: Any) -> ChunkHead:
    fields: dict[str, Any] = {
        "kind": "contribute", "epoch": EPOCH, "round": ROUND, "index": 0,
        "count": count_pieces(len(packet.data)), "total_bytes": len(packet.data),
        "codec": packet.codec, "sizes": list(packet.sizes), "weight": 1.0,
    }  # fmt: skip
    return ChunkHead(**{**fields, **changes})


def plan_of(**changes: Any) -> RoundPlan:
    plan = RoundPlan(
        job=JOB, round=ROUND, epoch=EPOCH, members=[BAD, *HEALTHY], route="relay",
        reducer=f"{JOB}/reducer",
    )  # fmt: skip
    return msgspec.structs.replace(plan, **changes)


def vector(member: str) -> Tensor:
    return torch.full((ELEMENTS,), float(member[1:]))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(plan_of())
    yield bench
    bench.close()


def finish(bench: Bench, *, members: list[str] = HEALTHY) -> list[str]:
    """Let the healthy members contribute, check their result, and return who is in it."""
    for member in members:
        bench.contribute(member, vector(member))
    if bench.result(members[0]) is None:
        bench.reducer._handle(MemberLost(JOB, EPOCH, BAD))
    results = [bench.result(member) for member in members]
    first = results[0]
    assert first is not None, bench.endpoint.events
    for other in results[1:]:
        assert other is not None
        assert torch.equal(other[0], first[0])
        assert other[1] == first[1]
    assert [name for name in first[1] if name != BAD] == members
    if BAD not in first[1]:
        assert torch.equal(first[0], torch.full((ELEMENTS,), 2.0))
    return first[1]


GOOD = make_codec("fp32").encode(vector(BAD), key="x")

WRONG: dict[str, dict[str, Any]] = {
    "another job's tensors": {"sizes": [5], "total_bytes": 20, "count": 1},
    "another codec": {"codec": "bf16", "total_bytes": 2 * ELEMENTS, "count": 1},
    "unknown codec": {"codec": "fp99"},
    "a codec of 5,000 digits": {"codec": "int8:" + "9" * 5000},
    "a codec of 500 brackets": {"codec": "feedback(" * 500 + "fp32" + ")" * 500},
    "16 PiB": {"sizes": [2**52], "total_bytes": 2**54, "count": count_pieces(2**54)},
    "sizes that do not fit": {"sizes": [ELEMENTS - 1]},
    "negative size": {"sizes": [ELEMENTS + 1, -1]},
    "stale round": {"round": ROUND - 1},
    "coming round": {"round": ROUND + 1},
    "weight NaN": {"weight": math.nan},
    "weight negative": {"weight": -1.0},
    "weight infinite": {"weight": math.inf},
    "weight huge": {"weight": 1e300},
    "speaks for others": {"contributors": ["w1"]},
    "speaks for strangers": {"contributors": [BAD, "w9"]},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_contribution_excludes_only_its_member(bench: Bench, what: str) -> None:
    changes = WRONG[what]
    head = head_of(GOOD, **changes)
    data = bytes(GOOD.data)[: min(head.total_bytes, 256 * 1024)]
    bench.send(BAD, head, data)
    assert finish(bench) == HEALTHY
    assert bench.refused(BAD)
    assert [e.kind for e in bench.endpoint.events] == ["contribution-refused"]
    kinds = [head.kind for head, _ in bench.endpoint.said[BAD]]
    assert kinds == ["refused"]


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_contribution_to_another_epoch_is_refused_by_name(bench: Bench, epoch: int) -> None:
    for _ in range(3):
        bench.contribute(BAD, vector(BAD), epoch=epoch)
    assert finish(bench) == HEALTHY
    assert len(bench.refused(BAD)) == 1
    assert "EpochChanged" in str(bench.endpoint.said[BAD][0][1])


def test_late_piece_of_a_decided_epoch_is_no_news(bench: Bench) -> None:
    finish(bench)
    bench.reducer._handle(Verdict(ROUND, EPOCH, committed=True))
    bench.contribute("w1", vector("w1"))
    assert bench.refused("w1") == []
    assert bench.endpoint.said["w1"][-1][0].kind == "refused"


@pytest.mark.parametrize(
    ("bad", "weight"),
    [(math.nan, 5.0), (math.inf, 5.0), (-math.inf, 1.0), (3e38, 5.0), (3e38, 1.0), (-1e9, 1.0)],
)
def test_absurd_values_are_left_out_by_name(bench: Bench, bad: float, weight: float) -> None:
    values = vector(BAD)
    values[17] = bad
    bench.contribute(BAD, values, weight=weight)
    assert finish(bench) == HEALTHY
    assert [e.kind for e in bench.endpoint.events] == ["contribution-left-out"]
    assert BAD in bench.refused(BAD)[0]
    assert bench.result(BAD) is not None, "it takes part, only its values do not"


@pytest.mark.parametrize("aggregation", ["", "median/finite/x"])
def test_damaged_sparse_packet_excludes_only_its_member(bench: Bench, aggregation: str) -> None:
    for member in [BAD, *HEALTHY]:
        packet = make_codec("topk:0.1").encode(vector(member), key="x")
        data = bytearray(packet.data)
        if member == BAD:
            data[:4000] = b"\xff" * 4000
        for index, piece in enumerate(pieces(data)):
            bench.send(member, head_of(packet, index=index, aggregation=aggregation), piece)
    found = bench.result("w1")
    assert found is not None, bench.endpoint.events
    assert found[1] == HEALTHY
    assert len(bench.refused(BAD)) == 1
    if not aggregation:
        assert "positions in a sparse packet are damaged" in bench.refused(BAD)[0]
        assert [head.kind for head, _ in bench.endpoint.said[BAD]] == ["refused"]


def test_announced_bytes_take_no_memory(bench: Bench) -> None:
    own, nbytes = psutil.Process(), 4 * 2**30
    before = own.memory_info().rss
    big = {"sizes": [nbytes // 4], "total_bytes": nbytes, "count": count_pieces(nbytes)}
    bench.send(BAD, head_of(GOOD, **big), bytes(256 * 1024))
    assert bench.reducer.figures()["held_bytes"] == nbytes
    assert own.memory_info().rss - before < 2**28
    assert finish(bench) == HEALTHY


def test_garbage_is_told_once_and_does_not_stop_the_member(bench: Bench) -> None:
    for payload in (b"", b"\x00", b"\xff\xff\xff", b"\x00\x01\xc1", b"\x00\x02\x93\x01"):
        bench.raw(BAD, payload)
    assert len(bench.refused(BAD)) == 1
    bench.contribute(BAD, vector(BAD))
    assert finish(bench) == [BAD, *HEALTHY]


def test_impossible_numbers_in_a_question_cost_no_memory(bench: Bench) -> None:
    finish(bench)
    bench.send(BAD, head_of(GOOD, kind="resume", count=1, total_bytes=2**62, have=[2**40]))
    assert len(bench.endpoint.said[BAD][-1][0].have) == 2


def by_sites(**changes: Any) -> RoundPlan:
    return plan_of(
        route="hierarchical", sites=[[BAD, "w2"], ["w1", "w3"]], stores=["x:1", "y:1"], **changes
    )


def test_delegates_speak_for_sites_in_slot_order() -> None:
    bench = Bench(by_sites())
    bench.contribute("w1", torch.full((ELEMENTS,), 4.0), weight=3.0, contributors=["w1", "w3"])
    bench.contribute(BAD, torch.full((ELEMENTS,), 8.0), weight=1.0, contributors=[BAD, "w2"])
    found = bench.result("w1")
    assert found is not None
    assert found[1] == [BAD, "w1", "w2", "w3"]
    assert torch.equal(found[0], torch.full((ELEMENTS,), 5.0))
    assert bench.result("w3") is None, "its delegate hands it down"
    bench.close()


@pytest.mark.parametrize(
    ("names", "weight"),
    [([BAD, "w3"], 1.0), (["w1", "w3"], 1.0), (["w9"], 1.0), ([BAD, BAD], 1.0), ([], 1.0)],
)
def test_delegate_that_names_others_than_its_site_is_refused(
    names: list[str], weight: float
) -> None:
    bench = Bench(by_sites())
    bench.contribute(BAD, vector(BAD), weight=weight, contributors=names)
    bench.contribute("w1", vector("w1"), contributors=["w1", "w3"])
    found = bench.result("w1")
    assert found is not None
    assert found[1] == ["w1", "w3"]
    assert bench.refused(BAD)
    bench.close()


def test_site_without_anything_usable_still_gets_the_result() -> None:
    bench = Bench(by_sites())
    bench.contribute(BAD, torch.zeros(ELEMENTS), weight=0.0, contributors=[])
    bench.contribute("w1", vector("w1"), contributors=["w1", "w3"])
    found = bench.result(BAD)
    assert found is not None
    assert found[1] == ["w1", "w3"]
    assert bench.endpoint.events == []
    bench.close()


def test_member_that_is_no_delegate_is_refused() -> None:
    bench = Bench(by_sites())
    bench.contribute("w2", vector("w2"))
    bench.contribute(BAD, vector(BAD), contributors=[BAD, "w2"])
    bench.contribute("w1", vector("w1"), contributors=["w1", "w3"])
    assert bench.result("w1") is not None
    assert len(bench.refused("w2")) == 1
    bench.close()


anything = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda **fields: head_of(GOOD, **fields),
        kind=st.sampled_from(["contribute", "contribute", "resume", "result", "refused", "?"]),
        epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1, EPOCH + 1, -1, 2**63 - 1]),
        round=st.sampled_from([ROUND, ROUND, ROUND, ROUND - 1, ROUND + 1]),
        index=st.sampled_from([0, 1, 0, 1, 2, -1, 2**62]),
        count=st.sampled_from([2, 2, 2, 1, 0, -1, 2**40]),
        total_bytes=st.sampled_from([len(GOOD.data), len(GOOD.data), 0, -4, 20, 2**50]),
        codec=st.one_of(
            st.sampled_from(["fp32", "fp32", "bf16", "int8", "int8:0", "feedback(fp32)", "topk:9"]),
            st.text(max_size=8),
        ),
        sizes=st.one_of(
            st.just([ELEMENTS]), st.lists(st.integers(-5, 2**40), max_size=3), st.just([5])
        ),
        weight=st.one_of(st.just(1.0), st.floats(), st.sampled_from([-1.0, 1e15, 1e300])),
        contributors=st.sampled_from([[], [BAD], ["w1"], [BAD, "w1"], ["", "w9"]]),
        have=st.lists(st.integers(-1, 2**40), max_size=3),
    ),
)
sized = st.sampled_from([0, 1, 20, 256 * 1024, 4 * ELEMENTS - 256 * 1024])


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(anything, sized, st.booleans()), max_size=6), st.booleans())
def test_no_sequence_of_bad_pieces_touches_the_others(
    said: list[tuple[Any, int, bool]], honest_at_last: bool
) -> None:
    bench = Bench(plan_of())
    for what, nbytes, poisoned in said:
        if isinstance(what, bytes):
            bench.raw(BAD, what)
        else:
            bench.send(BAD, what, (b"\xff" if poisoned else b"\x00") * nbytes)
    if honest_at_last:
        bench.contribute(BAD, vector(BAD))
    finish(bench)
    assert bench.reducer.figures()["held_bytes"] <= 4 * 4 * ELEMENTS + 2**20
    bench.close()
