"""The strategies' promises on the real routes: a real hub, real sockets, relay and direct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.group.base import Group
from atoll.methods.every_step import EveryStep
from atoll.methods.periodic import Average, DiLoCo
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, plain_training, start_run, train_together
from tests.group.hub_world import HubWorld
from tests.strategies.on_routes import train, wide_model

STEPS = 5
OUTERS = [
    pytest.param(DiLoCo(every=2), id="diloco"),
    pytest.param(Average(every=2), id="average"),
    pytest.param(EveryStep(), id="ddp"),
]
ROUTES = ["relay", "direct"]


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(5)
def test_members_equal_those_that_meet_in_memory(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    runs = together(world(3, route=route), train(options, steps=STEPS))
    expected = train_together(options, members=3, steps=STEPS)
    assert runs[0].rounds
    for ours, theirs in zip(runs[0].rounds, expected[0].rounds, strict=True):
        assert (ours - theirs).abs().max() < 1e-6
    for other in runs[1:]:
        assert [r.digest for r in other.results] == [r.digest for r in runs[0].results]
        assert all(torch.equal(a, b) for a, b in zip(other.rounds, runs[0].rounds, strict=True))


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.every(3)
def test_feedback_over_the_relay_is_bit_for_bit_that_in_memory(
    world: Callable[..., HubWorld], options: Any
) -> None:
    runs = together(world(2, route="relay"), train(options, codec="feedback(int8)", steps=STEPS))
    expected = train_together(options, members=2, steps=STEPS, codec="feedback(int8)")
    assert torch.equal(runs[0].vector(), expected[0].vector())
    assert torch.equal(runs[0].vector(), runs[1].vector())


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.every(5)
def test_bytes_on_the_wire_equal_the_formula_within_one_per_cent(
    world: Callable[..., HubWorld], route: str, codec: str, options: Any
) -> None:
    place = world(2, route=route)
    runs = together(place, train(options, codec=codec, model=wide_model(), steps=STEPS))
    for rank, (run, group) in enumerate(zip(runs, place.groups, strict=True)):
        expected = run.outer.traffic(32_002, 2, steps=STEPS, rank=rank)
        sent = expected.relay_sent_bytes if route == "relay" else expected.direct_sent_bytes
        got = expected.relay_received_bytes if route == "relay" else expected.direct_received_bytes
        assert group.sent_bytes == pytest.approx(sent, rel=0.01)
        assert group.received_bytes == pytest.approx(got, rel=0.01)
        assert run.task.round == expected.rounds


@pytest.mark.parametrize("options", [Average(every=2), EveryStep()])
def test_one_member_of_a_hub_trains_as_if_there_were_none(
    world: Callable[..., HubWorld], options: Any
) -> None:
    (run,) = together(world(1, route="auto"), train(options, steps=STEPS))
    assert torch.equal(run.vector(), plain_training(STEPS))
    assert sum(result.sent_bytes for result in run.results) == 0


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(5)
def test_survivors_of_a_lost_member_finish_identical(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    place = world(3, route=route)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(1)
        if group.me == "w1":
            place.die(group)
            return run
        run.train(STEPS - 1)
        run.note(run.outer.finish(run.task))
        return run

    results = place.run(body)
    first, last = results[0], results[2]
    assert isinstance(first, Run), first
    assert isinstance(last, Run), last
    assert torch.equal(first.vector(), last.vector())
    assert first.results[-1].contributors == ("w0", "w2")
    assert first.task.step == STEPS
