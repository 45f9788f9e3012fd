"""Gossip and pairs on the real routes: a real hub, real sockets, relay and direct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.group.base import Group
from atoll.methods.decentralized import Gossip, NoLoCo, Pairwise
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, start_run, train_together
from tests.group.hub_world import HubWorld
from tests.strategies.on_routes import train, wide_model

STEPS = 5
OUTERS = [
    pytest.param(Gossip(), id="d-psgd"),
    pytest.param(Gossip(graph="random", push_sum=True), id="push-sum"),
    pytest.param(NoLoCo(every=2), id="noloco"),
    pytest.param(Pairwise(delay=1), id="ad-psgd"),
]
ROUTES = ["relay", "direct"]


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_each_member_equals_the_one_that_meets_others_in_memory(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    runs = together(world(3, route=route), train(options, codec="feedback(int8)", steps=STEPS))
    expected = train_together(options, members=3, steps=STEPS, codec="feedback(int8)")
    for run, like in zip(runs, expected, strict=True):
        assert len(run.rounds) == len(like.rounds) > 1
        for ours, theirs in zip(run.rounds, like.rounds, strict=True):
            assert (ours - theirs).abs().max() < 1e-6
        assert [r.digest for r in run.results] == [r.digest for r in runs[0].results]
        assert torch.equal(run.vector(), runs[0].vector())


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_bytes_on_the_wire_equal_the_formula_within_one_per_cent(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    place = world(3, route=route)
    runs = together(place, train(options, codec="int8", model=wide_model(), steps=STEPS))
    for rank, (run, group) in enumerate(zip(runs, place.groups, strict=True)):
        expected = run.outer.traffic(32_002, 3, steps=STEPS, rank=rank)
        sent = expected.relay_sent_bytes if route == "relay" else expected.direct_sent_bytes
        got = expected.relay_received_bytes if route == "relay" else expected.direct_received_bytes
        assert group.sent_bytes == pytest.approx(sent, rel=0.01, abs=3000)
        assert group.received_bytes == pytest.approx(got, rel=0.01, abs=3000)
        assert run.task.round == expected.rounds


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_survivors_of_a_lost_member_end_with_one_model(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    place = world(3, route=route)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(2)
        if group.me == "w1":
            place.die(group)
            return run
        run.train(STEPS - 2)
        run.note(run.outer.finish(run.task))
        return run

    results = place.run(body)
    first, last = results[0], results[2]
    assert isinstance(first, Run), first
    assert isinstance(last, Run), last
    assert torch.equal(first.vector(), last.vector())
    assert first.results[-1].contributors == ("w0", "w2")
    assert first.task.step == STEPS
