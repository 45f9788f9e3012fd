"""Members of a SWARM train the model that one process trains, while members come and go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from atoll.errors import DataError
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.swarm.places import SwarmSettings
from tests.train.swarm.world import FREE_BYTES, World, expected

STEPS, COUNT = 4, 6


def made(
    *, stages: int = 2, codec: str = "fp32", steps: int = STEPS, early: int = 0, save_every: int = 0
) -> World:
    settings = SwarmSettings(stages, COUNT, rebalance_s=0, early=early, save_every=save_every)
    return World("gpt", settings, steps, codec)


def start(found: World, members: int) -> World:
    for number in range(members):
        found.start(f"w{number}")
    return found


def world(members: int, **settings: Any) -> World:
    return start(made(**settings), members)


def assert_close(found: World, *, within: float = 1e-4) -> None:
    """Compare with the whole model; sums over members are rounded in another order.

    After eight steps at rate 0.5 that is up to 9e-6 of the largest weight; a step or an early
    microbatch too few is over 0.2.
    """
    early = found.settings.early
    parameters, _ = expected("gpt", steps=found.steps, microbatches=COUNT, early=early)
    own = found.parameters()
    assert set(own) == set(parameters)
    for key, value in parameters.items():
        assert (own[key] - value).abs().max() <= within * value.abs().max(), key


def kill_first(found: World, stage: int) -> None:
    found.kill(found.ledger.serving(stage)[0].holder.member)


def join_and_lose(found: World, *, after: int, until: int) -> None:
    """Let two members join while three train, and kill one that drove until then.

    The job rests at the latter step until they are there, and does not end before.
    """
    found.rests_at = until
    start(found, 3)
    found.until(lambda: found.ledger.step >= after)
    found.start("w3")
    found.start("w4")

    def goes_on() -> None:
        kill_first(found, 0)
        found.rests_at = math.inf

    found.when(
        lambda: found.ledger.step >= until and len(found.ledger.serving(0)) >= 2, then=goes_on
    )


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
    assert_close(found)


@pytest.mark.parametrize("early", [2, 5])
@pytest.mark.parametrize(("members", "stages"), [(1, 1), (3, 3), (4, 2)])
@pytest.mark.every(4)
def test_early_microbatches_use_the_weights_before(members: int, stages: int, early: int) -> None:
    found = world(members, stages=stages, early=early, steps=6)
    found.wait()
    assert_close(found)
    plain, _ = expected("gpt", steps=6, microbatches=COUNT)
    assert any((found.parameters()[key] != value).any() for key, value in plain.items())


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.every(2)
def test_a_kill_does_not_change_what_is_early(stage: int) -> None:
    found = made(early=3, steps=6)
    found.when(
        lambda: found.ledger.step >= 2 and found.ledger.steps.ahead[stage].counted,
        then=lambda: kill_first(found, stage),
    )
    start(found, 4)
    found.wait()
    assert_close(found)


def test_who_joins_computes_early_ones_on_the_weights_before() -> None:
    found = made(early=3, steps=8)
    join_and_lose(found, after=2, until=4)
    found.wait()
    assert found.recovered
    assert_close(found)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.every(2)
def test_a_member_killed_in_a_step_does_not_change_the_result(stage: int) -> None:
    found = made()
    found.when(
        lambda: found.ledger.step >= 1 and found.ledger.counts[0].counted,
        then=lambda: kill_first(found, stage),
    )
    start(found, 4)
    found.wait()
    assert_close(found)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.every(2)
def test_a_copy_of_a_killed_members_sum_is_taken_over(stage: int) -> None:
    found = made()

    def copied() -> list[str]:
        count = found.ledger.counts[stage]
        with_copies = [holder.member for holder, copy in count.copies.items() if copy.shares]
        return with_copies if not count.agreed_by else []

    def kill_one_with_a_copy() -> None:
        count = found.ledger.counts[stage]
        found.kill(copied()[0])
        assert any(share.copy for share in count.log)

    found.when(copied, then=kill_one_with_a_copy)
    start(found, 4)
    found.wait()
    assert_close(found)


def test_members_join_and_a_killed_driver_is_replaced() -> None:
    found = made(steps=6)
    join_and_lose(found, after=1, until=3)
    found.wait()
    assert_close(found)
    assert {member.step for name, member in found.members.items() if name not in found.lost} == {6}


def test_a_stage_without_members_waits_for_one() -> None:
    found = made()
    found.when(
        lambda: found.ledger.step >= 1 and found.ledger.counts[0].counted,
        then=lambda: kill_first(found, 1),
    )
    start(found, 2)
    found.until(lambda: found.lost and found.ledger.paused())
    assert "no member serves stage 1" in found.ledger.paused()
    for member in found.members.values():
        member.stop()
    found.wait()


@pytest.mark.parametrize(("save_every", "early"), [(0, 0), (2, 0), (2, 3)])
@pytest.mark.every(2)
def test_a_lost_stage_goes_on_from_a_checkpoint_with_all(save_every: int, early: int) -> None:
    """Whatever was done after it is done again: the result is that of one process."""
    found = made(steps=6, save_every=save_every, early=early)
    found.when(
        lambda: found.ledger.step >= 3 and found.ledger.counts[0].counted,
        then=lambda: kill_first(found, 1),
    )
    start(found, 2)
    found.until(lambda: found.lost and found.ledger.paused())
    found.start("w2")
    found.until(lambda: found.ledger.history or found.ledger.step >= 6)
    found.wait()
    assert found.ledger.history > 0
    assert sorted(found.files) == ([2, 4, 6] if save_every else [6])
    assert_close(found)


def test_a_swarm_over_int8_activations_trains() -> None:
    exact, coded = world(2), world(2, codec="int8")
    exact.wait()
    coded.wait()
    assert coded.network.sent_bytes < 0.5 * exact.network.sent_bytes
    assert_close(coded, within=0.05)


def test_news_that_overtake_a_verdict_make_none_recover() -> None:
    found = World("gpt", SwarmSettings(2, COUNT, rebalance_s=0), STEPS, verdict_s=0.05)
    for number in range(4):
        found.start(f"w{number}")
    found.wait()
    assert_close(found)
    assert not found.recovered


@pytest.mark.parametrize("early", [0, 3])
def test_a_swarm_that_is_stopped_ends_at_one_step_on_all_members(early: int) -> None:
    found = made(steps=1_000_000, early=early)
    stopped = found.when(lambda: found.ledger.step >= 2, then=found.ledger.stop)
    start(found, 4)
    found.until(stopped.is_set)
    found.steps = found.ledger.saves.last
    found.wait()
    assert_close(found)


def test_a_swarm_in_a_subspace_trains_the_confined_model() -> None:
    found = world(4, stages=2, codec="subspace:5")
    found.wait()
    cut = StageCut(stages=2, size=5)
    parameters, _ = expected("gpt", steps=STEPS, microbatches=COUNT, cut=cut)
    own = found.parameters()
    assert set(own) == set(parameters)
    for key, value in parameters.items():
        assert (own[key] - value).abs().max() <= 1e-4 * value.abs().max(), key
    # Bytes without the copies of sums that several members of a stage keep.
    plain, packed = world(2, stages=2), world(2, stages=2, codec="subspace:5")
    plain.wait()
    packed.wait()
    assert packed.network.sent_bytes < 0.6 * plain.network.sent_bytes


def test_members_tell_their_free_memory() -> None:
    found = world(2, steps=1)
    found.wait()
    assert {member.free_bytes for member in found.ledger.members.values()} == {FREE_BYTES}


def test_a_member_that_misses_the_last_round_has_not_failed() -> None:
    found = World("gpt", SwarmSettings(1, COUNT, rebalance_s=0), STEPS, left_behind=True)
    member = found.start("w0")
    found.wait()
    assert member.finished


def test_a_job_whose_data_does_not_do_fails_at_once() -> None:
    unfit = DataError("too little held-out text")
    found = World("gpt", SwarmSettings(2, COUNT, rebalance_s=0), STEPS, unfit=unfit)
    found.start("w0")
    with pytest.raises(AssertionError, match="too little held-out text"):
        found.wait()
