"""Groups that are connected before a round needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.collectives.collectives import weighted_mean
from atoll.group.routes.connecting import Connecting, PreparedGroup
from atoll.group.routes.direct import DirectGroup
from tests.group.meeting_place import Place, places
from tests.patience import PATIENCE_S


@pytest.fixture
def place() -> Iterator[Place]:
    with places() as make:
        place = make(4)
        for route in place.routes:
            route.first_epoch = 1
        yield place


def prepare(place: Place, *, ranks: range, epoch: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for rank in ranks:
        place.routes[rank].prepare(
            DirectGroup(epoch, place.members, place.routes[0].dial, deadline)
        )


def total(wires: BoundedProcessGroup) -> tuple[int, float]:
    values = torch.full((1000,), float(wires.rank))
    mean = weighted_mean(wires, values, codec=make_codec("fp32"), weight=1.0, key="x")
    return id(wires.group), mean.vector[0].item()


def groups_of(place: Place) -> list[Any]:
    """Wait until what was prepared is connected, and return the groups."""
    for route in place.routes:
        assert route._prepared is not None
        assert route._prepared._ended.wait(PATIENCE_S)
    return [route._prepared._group for route in place.routes if route._prepared is not None]


def test_the_first_exchange_finds_connections_and_lines(place: Place) -> None:
    prepare(place, ranks=range(4))
    prepared = groups_of(place)
    found = place.together(total)
    assert found == [(id(group), 1.5) for group in prepared]
    for route in place.routes:
        assert sorted(route.lines) == [name for name in place.members if name != route._me]


def test_a_member_that_did_not_prepare_is_met_all_the_same(place: Place) -> None:
    prepare(place, ranks=range(3))
    assert [mean for _, mean in place.together(total)] == [1.5] * 4


def test_what_was_prepared_for_another_plan_is_dropped(place: Place) -> None:
    prepare(place, ranks=range(4), epoch=7)
    prepared = groups_of(place)
    assert all(group is not None for group in prepared)
    assert [mean for _, mean in place.together(total)] == [1.5] * 4
    assert all(group._closed for group in prepared)


def test_after_a_round_nothing_is_prepared(place: Place) -> None:
    place.together(total)
    prepare(place, ranks=range(4), epoch=2)
    assert all(route._prepared is None for route in place.routes)


def test_ending_an_attempt_is_no_group() -> None:
    def connect(connecting: Connecting) -> None:
        while True:
            connecting.check()
            time.sleep(0.001)

    prepared = PreparedGroup("meeting", connect)
    assert prepared.take("meeting", over=lambda: True) is None
    assert prepared._ended.wait(PATIENCE_S)


def test_a_failed_attempt_is_no_group() -> None:
    def connect(_: Connecting) -> None:
        raise DeadlineExceeded("they did not come")

    assert PreparedGroup("meeting", connect).take("meeting", over=lambda: False) is None
    connecting = Connecting()
    connecting.end()
    with pytest.raises(PeerLost, match="abandoned"):
        connecting.check()
