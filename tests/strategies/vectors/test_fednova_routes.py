"""FedNova on the real routes: two vectors in one round, over a real hub and real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atoll.group.base import Group
from atoll.methods.periodic import Average
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, sgd, start_run
from tests.group.hub_world import HubWorld
from tests.strategies.vectors.test_fednova import PACES, keep_pace, uneven


@pytest.mark.parametrize("route", ["relay", "direct"])
def test_uneven_members_equal_those_that_meet_in_memory(
    world: Callable[..., HubWorld], route: str
) -> None:
    options = Average(every=8, weight="fednova")

    def body(group: Group) -> Run:
        slot = int(group.me[1:])
        run = start_run(options, group, slot, optimizer=sgd)
        while run.task.step < 16:
            keep_pace(run.task, slot)
            run.train(1)
        return run

    place = world(len(PACES), route=route)
    runs = together(place, body)
    expected = uneven(options, rounds=2, optimizer=sgd)
    assert (runs[0].vector() - expected[0].vector()).abs().max() < 1e-6
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
