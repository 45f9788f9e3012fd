"""Rounds beside training over a real hub, with real sockets, on both routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.group.base import Group
from atoll.methods.overlapped import Eager, Streaming
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, start_run, train_together
from tests.group.hub_world import HubWorld
from tests.strategies.on_routes import train, wide_model

STEPS = 9
OUTERS = [
    pytest.param(Streaming(every=4, fragments=2, delay=1), id="streaming"),
    pytest.param(Eager(every=3), id="eager"),
]
ROUTES = ["relay", "direct"]


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_members_equal_those_that_meet_in_memory(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    runs = together(world(3, route=route), train(options, steps=STEPS))
    expected = train_together(options, members=3, steps=STEPS)
    for ours, theirs in zip(runs, expected, strict=True):
        assert (ours.vector() - theirs.vector()).abs().max() < 1e-6
        assert torch.equal(ours.vector(), runs[0].vector())
        assert [r.digest for r in ours.results] == [r.digest for r in runs[0].results]
        assert len(ours.results) == len(theirs.results)


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_bytes_on_the_wire_equal_the_formula_within_one_per_cent(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    place = world(2, route=route)
    runs = together(place, train(options, codec="int8", model=wide_model(), steps=STEPS))
    for rank, (run, group) in enumerate(zip(runs, place.groups, strict=True)):
        expected = run.outer.traffic(32_002, 2, steps=STEPS, rank=rank)
        sent = expected.relay_sent_bytes if route == "relay" else expected.direct_sent_bytes
        assert group.sent_bytes == pytest.approx(sent, rel=0.01)
        assert run.task.round == expected.rounds


@pytest.mark.parametrize("options", OUTERS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(3)
def test_loss_in_a_running_round_keeps_one_model(
    world: Callable[..., HubWorld], route: str, options: Any
) -> None:
    place = world(3, route=route)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        if group.me == "w1":
            run.train(4)  # its round was begun, and its result is awaited
            place.die(group)
            return run
        run.train(STEPS)
        run.note(run.outer.finish(run.task))
        return run

    results = place.run(body)
    first, last = results[0], results[2]
    assert isinstance(first, Run), first
    assert isinstance(last, Run), last
    assert torch.equal(first.vector(), last.vector())
    assert first.outer.digest(first.task) == last.outer.digest(last.task)
    assert first.results[-1].contributors == ("w0", "w2")
    assert first.task.step == last.task.step == STEPS
    assert first.task.round == last.task.round
