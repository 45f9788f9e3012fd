"""The simulated rounds are those of the hub's own service: same rounds, members and times."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.simulate.record import Outcome
from atoll.simulate.setting import Setting
from atoll.simulate.world import World
from tests.simulate.fleets import fleet_of, setting_of
from tests.simulate.service_hub import ServiceHub, world_with_service


def both(setting: Setting) -> tuple[Outcome, Outcome]:
    world = world_with_service(setting)
    full = world.run()
    assert isinstance(world.hub, ServiceHub)
    assert not world.hub.loop.errors
    world.hub.close()
    return World(setting).run(), full


def attempts(outcome: Outcome) -> list[Any]:
    return [
        (row["round"], row["epoch"], row["members"], row["contributors"], row["committed"])
        for row in outcome.timeline
        if row["decided_s"]
    ]


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        ({}, {"jitter": 0.1}),
        ({"failures_per_day": 24.0}, {"repair_s": 120.0}),
        # With seed 0 a member joins and fails within the second that the database has cost by then.
        ({"failures_per_day": 48.0}, {"repair_s": 300.0, "quorum": 0.5, "jitter": 0.1, "seed": 1}),
    ],
)
def test_rounds_are_those_of_the_real_service(
    machine: dict[str, Any], changes: dict[str, Any]
) -> None:
    setting = setting_of(fleet_of(6, **machine), route="relay", duration_s=3600.0, **changes)
    machine_only, full = both(setting)
    assert full.rounds_committed > 10
    assert attempts(machine_only) == attempts(full)
    assert machine_only.goodput == pytest.approx(full.goodput, rel=0.01)
    for name, share in full.shares.items():
        assert machine_only.shares[name] == pytest.approx(share, abs=0.01)
