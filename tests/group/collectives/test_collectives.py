from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, GroupError, PeerLost
from atoll.group.aggregation import COLLECTIVES, Aggregation
from atoll.group.collectives.adding import SUMS
from atoll.group.collectives.collectives import BoundedProcessGroup, Exchanged, weighted_mean
from atoll.group.collectives.costs import moved_bytes, wire_elements
from tests.group.meeting_place import Place, places
from tests.patience import PATIENCE_S

MEMBERS = [1, 2, 3, 5]
SIZES = [0, 1, 7, 1000, 140_001]
Places = Callable[[int], Place]


@pytest.fixture(scope="module")
def place() -> Iterator[Places]:
    with places() as made:
        yield made


def vector(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + rank))


def agreed(
    wires: BoundedProcessGroup,
    x: Tensor,
    *,
    codec: str = "fp32",
    weight: float = 1.0,
    **aggregation: str,
) -> Exchanged:
    return weighted_mean(
        wires,
        x,
        codec=make_codec(codec),
        weight=weight,
        key="x",
        aggregation=Aggregation(**aggregation),
    )


def exact(n: int, size: int, weights: list[float]) -> Tensor:
    total = torch.zeros(size, dtype=torch.float64)
    for rank in range(n):
        total += weights[rank] * vector(rank, size).double()
    return total / math.fsum(weights)


@pytest.mark.parametrize("n", MEMBERS)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.every(4)
def test_members_end_bit_identical_near_the_float64_sum(place: Places, name: str, n: int) -> None:
    weights = [1.0 + rank for rank in range(n)]
    for size in SIZES:
        results = place(n).together(
            lambda w, size=size: agreed(  # type: ignore[misc]
                w, vector(w.rank, size), weight=weights[w.rank], collective=name
            )
        )
        for found in results:
            assert found.digest == results[0].digest
            assert torch.equal(found.vector, results[0].vector)
            assert found.contributors == tuple(f"w{rank}" for rank in range(n))
            assert found.weight == sum(weights)
        torch.testing.assert_close(
            results[0].vector.double(), exact(n, size, weights), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", ["auto", *SUMS])
@pytest.mark.every(3)
def test_another_order_of_the_ring_has_the_same_result(place: Places, name: str) -> None:
    order = (0, 3, 1, 4, 2)
    requested: list[tuple[int, int]] = []

    class Noted:
        """Notes who sends to whom."""

        def __init__(self, wires: BoundedProcessGroup) -> None:
            self._wires = wires

        def send(self, tensors: list[Tensor], to: int, tag: int) -> object:
            requested.append((self._wires.rank, to))
            return self._wires.group.send(tensors, to, tag)

        def recv(self, tensors: list[Tensor], of: int, tag: int) -> object:
            return self._wires.group.recv(tensors, of, tag)

    def work(wires: BoundedProcessGroup) -> Exchanged:
        ringed = replace(wires, ring=order, group=Noted(wires))
        return agreed(ringed, vector(wires.rank, 1000), collective=name)

    results = place(5).together(work)
    assert len({found.digest for found in results}) == 1
    assert results[0].contributors == tuple(f"w{rank}" for rank in range(5))
    torch.testing.assert_close(
        results[0].vector.double(), exact(5, 1000, [1.0] * 5), rtol=1e-5, atol=1e-6
    )
    if name in ("auto", "ring"):
        hops = set(zip(order, (*order[1:], order[0]), strict=True))
        assert set(requested) == hops


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.every(5)
def test_bytes_are_counted_and_equal_the_formula(place: Places, name: str, n: int) -> None:
    for size in (0, 3, 10_007):
        results = place(n).together(
            lambda w, size=size: agreed(w, vector(w.rank, size), collective=name)  # type: ignore[misc]
        )
        for rank, found in enumerate(results):
            expected = moved_bytes(name, rank=rank, members=n, elements=wire_elements(size, n))
            assert (found.sent_bytes, found.received_bytes) == expected


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_integers_are_exact_and_repeatable(place: Places, name: str) -> None:
    x = torch.arange(-2000, 2003, dtype=torch.float32)
    for n in (3, 5):

        def add(wires: BoundedProcessGroup) -> Tensor:
            mine = x + wires.rank
            SUMS[name](wires, mine)
            return mine

        for found in place(n).together(add):
            assert torch.equal(found, n * x + sum(range(n)))
        noise = [
            place(n).together(lambda w: agreed(w, vector(w.rank, 5000), collective=name))
            for _ in range(2)
        ]
        assert torch.equal(noise[0][0].vector, noise[1][0].vector)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_values_that_are_not_finite_are_left_out_by_their_sender(place: Places, name: str) -> None:
    def member(wires: BoundedProcessGroup) -> Exchanged:
        x = vector(wires.rank, 999)
        if wires.rank == 1:
            x[5] = math.nan
        return agreed(wires, x, collective=name)

    for found in place(3).together(member):
        assert found.contributors == ("w0", "w2")
        expected = (vector(0, 999).double() + vector(2, 999).double()) / 2
        torch.testing.assert_close(found.vector.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_sum_is_the_mean_times_those_that_have_weight(place: Places, name: str) -> None:
    def member(wires: BoundedProcessGroup) -> Exchanged:
        weight = 0.0 if wires.rank == 2 else 1.0
        return agreed(
            wires, vector(wires.rank, 50), weight=weight, collective=name, aggregate="sum"
        )

    expected = vector(0, 50).double() + vector(1, 50).double()
    for found in place(3).together(member):
        torch.testing.assert_close(found.vector.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["int8", "bf16", "feedback(int8)"])
def test_a_star_carries_any_codec_as_the_reducer_does(place: Places, codec: str) -> None:
    size = 4099
    results = place(3).together(
        lambda w: agreed(w, vector(w.rank, size), codec=codec, collective="star")
    )
    assert len({found.digest for found in results}) == 1
    nbytes = make_codec(codec).nbytes(size)
    for rank, found in enumerate(results):
        sent = 2 * (nbytes + 3 * 8) if rank == 0 else nbytes + 8
        received = 2 * (nbytes + 8) if rank == 0 else nbytes + 3 * 8
        assert (found.sent_bytes, found.received_bytes) == (sent, received)
        error = (found.vector.double() - exact(3, size, [1.0] * 3)).abs().max()
        assert error < 0.05


@pytest.mark.parametrize("name", SUMS)
def test_codecs_that_round_are_refused_where_partial_sums_travel(place: Places, name: str) -> None:
    results = place(2).run(
        lambda w: agreed(w, vector(w.rank, 10), codec="int8", collective=name), timeout_s=PATIENCE_S
    )
    for error in results:
        assert isinstance(error, ConfigError)
        assert "every hop" in str(error)
        assert '"star"' in str(error)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_absent_member_fails_all_without_partial_sums(name: str) -> None:
    with places() as made:
        place = made(3)
        place.together(lambda w: agreed(w, vector(w.rank, 10)))  # all are connected
        over = threading.Event()

        def member(wires: BoundedProcessGroup) -> Exchanged | None:
            if wires.rank == 1:
                over.wait(PATIENCE_S)
                return None
            try:
                return agreed(wires, vector(wires.rank, 100_000), collective=name)
            finally:
                if wires.rank == 2:
                    over.set()

        results = place.run(member, timeout_s=1.0)
    assert isinstance(results[0], GroupError), results
    assert isinstance(results[2], GroupError), results


@pytest.mark.parametrize("collective", ["auto", "star"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rules_by_coordinate_work_without_a_reducer(
    place: Places, codec: str, collective: str
) -> None:
    size = 5000

    def member(wires: BoundedProcessGroup) -> Exchanged:
        x = vector(wires.rank, size) * (1e30 if wires.rank == 1 else 1.0)
        return agreed(wires, x, codec=codec, collective=collective, aggregate="median")

    results = place(3).together(member)
    assert len({found.digest for found in results}) == 1
    rows = [vector(rank, size) * (1e30 if rank == 1 else 1.0) for rank in range(3)]
    if codec != "fp32":
        coder = make_codec(codec)
        rows = [coder.decode(coder.encode(row)) for row in rows]
    expected = torch.stack(rows).median(0).values
    assert (results[0].vector - expected).abs().max() < (1e-9 if codec == "fp32" else 0.05)


@pytest.mark.parametrize("words", [{"aggregate": "krum:0"}, {"admission": "norms"}])
def test_rules_about_whole_vectors_are_never_applied_to_parts(
    place: Places, words: dict[str, str]
) -> None:
    aggregation, codec = Aggregation(**words), make_codec("fp32")

    def member(wires: BoundedProcessGroup) -> Exchanged:
        x = vector(wires.rank, 10)
        return weighted_mean(wires, x, codec=codec, weight=1.0, key="x", aggregation=aggregation)

    for error in place(3).run(member, timeout_s=PATIENCE_S):
        assert isinstance(error, ConfigError)
        assert "needs the reducer" in str(error)


def test_too_few_members_for_a_rule_are_an_error_for_all(place: Places) -> None:
    for error in place(2).run(
        lambda w: agreed(w, vector(w.rank, 10), aggregate="trimmed:1"), timeout_s=PATIENCE_S
    ):
        assert isinstance(error, PeerLost)
