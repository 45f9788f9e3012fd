"""The value model of several policies: pooled, distinguished, and gone on with exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from atoll.errors import DataError
from atoll.rl.text.critic import TextCritic
from atoll.rl.text.episodes import Episodes
from tests.rl.text.small import episodes, gpt, rl_table

POLICIES = ("one", "two")


def batch(policy: str, *, score: float, seed: int = 1, sequence: int = 1) -> Episodes:
    """Return completions that all get the same score."""
    found = episodes(gpt(1), gpt(1), seed=seed, policy=policy, kl=0.0, sequence=sequence, count=8)
    last = torch.arange(found.rewards.shape[1]) == found.lengths[:, None] - 1
    found.scores = torch.full_like(found.scores, score)
    found.rewards = score * last
    return found


def critic(kind: str = "pooled") -> TextCritic:
    rl = rl_table(critic=kind, critic_lr=1e-2, critic_epochs=4, critic_minibatches=1)
    return TextCritic(POLICIES, gpt(1, spread=0.02), rl, seed=5)


def mean_value(found: TextCritic, of: Episodes) -> float:
    return found.of(of)[of.mask].mean().item()


def test_only_a_conditioned_critic_learns_opposite_values() -> None:
    one, two = batch("one", score=1.0), batch("two", score=-1.0)
    values = {}
    for kind in ("pooled", "unconditioned"):
        found = critic(kind)
        for _ in range(12):
            found.learn([one, two])
        values[kind] = (mean_value(found, one), mean_value(found, two))
    first, second = values["pooled"]
    assert first > 0.8
    assert second < -0.8
    mixture_one, mixture_two = values["unconditioned"]
    assert mixture_one == pytest.approx(mixture_two)
    assert abs(mixture_one) < 0.3


def test_rewards_are_learned_at_any_scale() -> None:
    # A score that depends on the text: its length, small for one policy and large for the other.
    found = critic()
    pair = []
    for policy, scale in (("one", 1.0), ("two", 100.0)):
        some = batch(policy, score=0.0)
        last = torch.arange(some.rewards.shape[1]) == some.lengths[:, None] - 1
        some.rewards = scale * some.prompts[:, None].float() * last
        pair.append(some)
    for _ in range(20):
        stats = found.learn(pair)
    assert stats["one"]["explained_variance"] > 0.6
    assert stats["two"]["explained_variance"] > 0.6


def test_the_order_of_batches_does_not_matter() -> None:
    some = [batch("two", score=1.0, seed=4, sequence=2), batch("one", score=0.0, seed=3),
            batch("two", score=0.5, seed=2)]  # fmt: skip
    forth, back = critic(), critic()
    for _ in range(3):
        forth.learn(some)
        back.learn(some[::-1])
    for name, tensor in forth.snapshot().items():
        assert torch.equal(tensor, back.snapshot()[name]), name


def test_every_policy_weighs_the_same_whatever_its_share() -> None:
    one, two = batch("one", score=1.0), batch("two", score=-1.0)
    many = [dataclasses.replace(one, sequence=n) for n in range(1, 5)]
    mixed = critic("unconditioned")
    for _ in range(12):
        mixed.learn([*many, two])
    assert abs(mean_value(mixed, one)) < 0.3  # by count it would be 0.6


def test_saved_critic_continues_exactly() -> None:
    some = [batch("one", score=1.0), batch("two", score=0.0)]
    whole = critic()
    whole.learn(some)
    resumed, copy = critic(), critic()
    resumed.load_state_dict(whole.state_dict())
    copy.load_snapshot(whole.snapshot())
    assert torch.equal(copy.of(some[0]), whole.of(some[0]))
    assert copy.version == 1
    whole.learn(some)
    resumed.learn(some)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_values_depend_on_nothing_that_comes_later() -> None:
    found, some = critic(), batch("one", score=1.0)
    found.learn([some])
    cut = dataclasses.replace(some, tokens=some.tokens.clone())
    for row, start in enumerate(some.prompts.tolist()):
        cut.tokens[row, start + 1 :] = 7  # all but the first written token
    torch.testing.assert_close(found.of(cut)[:, :2], found.of(some)[:, :2])


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(DataError, match="three"):
        critic().of(batch("three", score=1.0))
