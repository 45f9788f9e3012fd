"""Members of a SWARM train the model that one process trains, whoever comes and goes."""

from __future__ import annotations

import pytest
import torch

from atoll.swarm.places import SwarmSettings
from tests.train.swarm.world import World, expected

STEPS, COUNT = 4, 6


def world(members: int, *, stages: int = 2, codec: str = "fp32", steps: int = STEPS) -> World:
    found = World("gpt", SwarmSettings(stages, COUNT, rebalance_s=0), steps, codec)
    for number in range(members):
        found.start(f"w{number}")
    return found


def assert_close(found: World, *, within: float) -> None:
    """Compare with the whole model; sums over members are rounded in another order."""
    parameters, _ = expected("gpt", steps=found.steps, microbatches=COUNT)
    own = found.parameters()
    assert set(own) == set(parameters)
    for key, value in parameters.items():
        assert (own[key] - value).abs().max() <= within * value.abs().max(), key


@pytest.mark.parametrize("stages", [1, 3])
def test_one_member_per_stage_trains_the_whole_model_bitwise(stages: int) -> None:
    found = world(stages, stages=stages)
    found.wait()
    parameters, losses = expected("gpt", steps=STEPS, microbatches=COUNT)
    own = found.parameters()
    assert set(own) == set(parameters)
    for key, value in parameters.items():
        assert torch.equal(own[key], value), key
    assert pytest.approx(losses, rel=1e-12) in found.losses.values()


def test_two_members_per_stage_train_the_same_model() -> None:
    found = world(4)
    found.wait()
    assert_close(found, within=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_member_killed_in_a_step_does_not_change_the_result(stage: int) -> None:
    found = world(4)
    found.until(lambda: found.ledger.step >= 1 and found.ledger.counts[0].counted)
    victim = next(m.holder.member for m in found.ledger.serving(stage))
    found.kill(victim)
    found.wait()
    assert_close(found, within=1e-5)


def test_members_join_and_a_killed_driver_is_replaced() -> None:
    found = world(3, steps=6)
    found.until(lambda: found.ledger.step >= 1)
    found.start("w3")
    found.start("w4")
    found.until(lambda: found.ledger.step >= 3 and len(found.ledger.serving(0)) >= 2)
    found.kill(found.ledger.serving(0)[0].holder.member)
    found.wait()
    assert_close(found, within=1e-5)
    assert {member.step for name, member in found.members.items() if name not in found.lost} == {6}


def test_a_stage_without_members_waits_for_one() -> None:
    found = world(2)
    found.until(lambda: found.ledger.step >= 1 and found.ledger.counts[0].counted)
    found.kill(found.ledger.serving(1)[0].holder.member)
    found.until(lambda: found.ledger.paused())
    assert "no member serves stage 1" in found.ledger.paused()
    for member in found.members.values():
        member.stop()


def test_a_swarm_over_int8_activations_trains() -> None:
    exact, coded = world(2), world(2, codec="int8")
    exact.wait()
    coded.wait()
    assert coded.network.sent_bytes < 0.5 * exact.network.sent_bytes
    assert_close(coded, within=0.05)
