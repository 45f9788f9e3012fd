"""Compressed methods on the real routes: a real hub, real sockets, relay and direct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.group.base import Group
from atoll.methods.every_step import Cocktail, DeMo, OneBitAdam, PowerSGD, SignMajority, Sparta
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, start_run, train_together
from tests.group.hub_world import HubWorld
from tests.strategies.on_routes import train

STEPS = 5
METHODS = [
    pytest.param(Sparta(probability=0.25), "fp16", id="sparta"),
    pytest.param(SignMajority(), "sign", id="signsgd"),
    pytest.param(SignMajority(feedback=True), "sign", id="signsgd-feedback"),
    pytest.param(PowerSGD(rank=1), "fp16", id="powersgd"),
    pytest.param(DeMo(decay=0.9, topk=2), "bf16", id="demo"),
    pytest.param(OneBitAdam(warmup_steps=2), "sign", id="one-bit-adam"),
    pytest.param(Cocktail(probability=0.5), "topk:0.5|int8", id="cocktail-sgd"),
]
BY_ALL_TO_ALL = [
    pytest.param(DeMo(), "bf16", id="demo"),
    pytest.param(OneBitAdam(warmup_steps=1), "int8", id="one-bit-adam"),
    pytest.param(Cocktail(probability=1.0), "int8", id="cocktail-sgd"),
]
ROUTES = ["relay", "direct"]


@pytest.mark.parametrize(("options", "codec"), METHODS)
@pytest.mark.every(3)
def test_relay_is_bit_identical_to_memory(
    world: Callable[..., HubWorld], options: Any, codec: str
) -> None:
    runs = together(world(3, route="relay"), train(options, codec=codec, steps=STEPS))
    expected = train_together(options, members=3, steps=STEPS, codec=codec)
    for run, other in zip(runs, expected, strict=True):
        assert torch.equal(run.vector(), other.vector())
        assert torch.equal(run.vector(), runs[0].vector())
        assert [r.digest for r in run.results] == [r.digest for r in runs[0].results]


@pytest.mark.parametrize(
    ("route", "options", "codec"),
    [pytest.param("direct", *case.values, id=f"direct-{case.id}") for case in METHODS]
    + [pytest.param("relay", *case.values, id=f"relay-{case.id}") for case in BY_ALL_TO_ALL],
)
@pytest.mark.every(5)
def test_survivors_of_a_lost_member_finish_identical(
    world: Callable[..., HubWorld], route: str, options: Any, codec: str
) -> None:
    place = world(3, route=route)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), codec=codec)
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
    assert [r.digest for r in first.results] == [r.digest for r in last.results]
    assert first.task.step == STEPS


@pytest.mark.parametrize(("options", "codec"), BY_ALL_TO_ALL)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.every(5)
def test_bytes_on_the_wire_equal_the_formula_within_one_per_cent(
    world: Callable[..., HubWorld], route: str, options: Any, codec: str
) -> None:
    place = world(3, route=route)
    model = nn.Sequential(nn.Linear(5, 16_000), nn.Tanh(), nn.Linear(16_000, 2))
    runs = together(place, train(options, codec=codec, model=model, steps=STEPS))
    for rank, (run, group) in enumerate(zip(runs, place.groups, strict=True)):
        expected = run.outer.traffic(128_002, 3, steps=STEPS, rank=rank)
        sent = expected.relay_sent_bytes if route == "relay" else expected.direct_sent_bytes
        got = expected.relay_received_bytes if route == "relay" else expected.direct_received_bytes
        assert group.sent_bytes == pytest.approx(sent, rel=0.01)
        assert group.received_bytes == pytest.approx(got, rel=0.01)
        assert run.task.round == expected.rounds
