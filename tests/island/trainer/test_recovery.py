"""An island among others: it gives its committed state without asking its ranks, and takes one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from atoll.checkpoint.format.part import Part
from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.group.single import SingleGroup
from atoll.strategies.base import Outer, extend_history_hash
from atoll.strategies.resolve import resolve
from atoll.train.state.committed import CommittedState, adopt
from tests.island.leading import Member, by_itself, count_calls, led, table
from tests.island.pool import Ranks

NAME, EVERY = "perceptron", 2
SHARDS = {"shard": 2}


def diloco(member: Member) -> tuple[Outer, SingleGroup]:
    options = {"every": EVERY, "shared_steps": 0}
    outer = resolve(StrategyTable(outer="diloco", codec="fp32", options=options)).build()
    group = SingleGroup()
    outer.setup(member.task, group=group, codec=make_codec("fp32"))
    extend_history_hash(member.task, outer.begin(member.task))
    member.outer = outer
    return outer, group


def give(member: Member) -> tuple[Part, Part]:
    """Return the committed state of a member that is a step ahead of it."""
    outer, _ = diloco(member)
    member.train(2 * EVERY + 1)
    told = count_calls(member) if member.broadcaster is not None else []
    parts = CommittedState(member.task, outer).parts()
    assert told == [], "others read from threads, in which no rank can be asked"
    return parts


def _give() -> Any:
    return led(give, NAME, table(), SHARDS)


def _take(shared: Part, inner: Part) -> Any:
    """Let a fresh island take a state over; return how it stands."""

    def use(member: Member) -> dict[str, Any]:
        return take(member, shared, inner)

    return led(use, NAME, table(), SHARDS)


def take(member: Member, shared: Part, inner: Part | None) -> dict[str, Any]:
    (outer, group), task = diloco(member), member.task
    member.train(1)  # of which nothing is to be left
    adopt(task, outer, shared=shared, inner=inner)
    group.committed_round = task.round  # as the hub would say
    found = {
        "step": task.step, "round": task.round, "base": outer.committed(task).base,
        "parameters": member.parameters(),
        "optimizer": copy.deepcopy(task.optimizer.state_dict()["state"]),
    }  # fmt: skip
    member.train(EVERY)  # up to the next round, and through it
    return found | {"later": task.round}


def test_an_island_gives_what_members_agree_on_and_no_optimizer(ranks: Ranks) -> None:
    shared, inner = ranks.run(2, _give)[0]
    plain = by_itself(NAME, table())
    found = take(plain, shared, inner)
    assert (found["step"], found["round"], found["later"]) == (4, 3, 4)
    assert len(found["optimizer"]) > 0, "its own stays"
    donor = by_itself(NAME, table())
    expected = take(by_itself(NAME, table()), give(donor)[0], None)
    for name, tensor in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], tensor, rtol=1e-6, atol=1e-7)


def test_an_island_takes_over_the_state_of_a_plain_member(ranks: Ranks) -> None:
    donor = by_itself(NAME, table())
    shared, inner = give(donor)
    found = ranks.run(2, _take, shared, inner)[0]
    expected = take(by_itself(NAME, table()), shared, inner)
    assert found["base"] == expected["base"]
    assert (found["step"], found["round"]) == (expected["step"], expected["round"])
    for name, tensor in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], tensor), name
    for place, own in expected["optimizer"].items():
        for key, tensor in own.items():
            assert torch.equal(found["optimizer"][place][key], tensor), f"{place} {key}"
    assert found["later"] == found["round"] + 1
