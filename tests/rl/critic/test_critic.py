import random

import pytest
import torch
from torch import Tensor

from atoll.errors import CheckpointCorrupt, ConfigError
from atoll.rl.critic.critic import Critic
from atoll.rl.trajectory import Trajectory
from tests.rl.lived import lived, table, task


def critic(*policies: str, kind: str = "pooled", seed: int = 0, **changes: object) -> Critic:
    made = Critic(table(**changes), seed=seed, kind=kind)
    for policy in policies:
        made.add_policy(task(policy))
    return made


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def lesson(policy: str, step: int, *, size: float = 1.0, columns: int = 8) -> Trajectory:
    """Return experience whose values are easy to learn: each step is an episode."""
    return lived(
        policy, seed=1000 * step + len(policy), sequence=step, columns=columns, ends=1.1,
        rewards=lambda seen: size * (seen[..., 0] + 0.5 * seen[..., 1]),
    )  # fmt: skip


def test_values_have_trajectory_shape_and_a_version() -> None:
    made = critic("a")
    made.learn([lived("a")])
    t = lived("a", cut=True)
    found = made.of(t)
    assert found.values.shape == (9, 4)
    assert found.cut_values.shape == (len(t.cut_at),)
    assert found.version == made.version == 1
    assert found.values.dtype == torch.float32


def test_the_values_of_many_are_those_of_each() -> None:
    made = Critic(table(), seed=0, kind="pooled")
    made.add_policy(task("wide", observation=(5,)))
    made.add_policy(task("a"))
    made.add_policy(task("wider", observation=(5,)))
    some = [
        lived("a", seed=1, cut=True), lived("wide", seed=2, features=5),
        lived("wider", seed=3, features=5, cut=True), lived("a", seed=4, length=3),
    ]  # fmt: skip
    made.learn(some)
    for one, found in zip(some, made.values_of(some), strict=True):
        alone = made.of(one)
        assert torch.allclose(alone.values, found.values, atol=1e-5)
        assert torch.allclose(alone.cut_values, found.cut_values, atol=1e-5)


def test_rewards_a_hundred_times_larger_are_learned_as_well() -> None:
    made = critic("small", "large", critic_lr=1e-2)
    for step in range(1, 21):
        stats = made.learn([lesson("small", step), lesson("large", step, size=100.0)])
    assert stats["large"]["value_scale"] > 50 * stats["small"]["value_scale"]
    for figures in stats.values():
        assert figures["value_loss"] < 0.1
        assert figures["explained_variance"] > 0.9


def test_the_order_of_a_batch_does_not_matter() -> None:
    some = [
        lived(policy, actor=actor, sequence=sequence, seed=sequence)
        for policy in ("b", "a") for actor in ("w1", "w2") for sequence in (1, 2, 10)
    ]  # fmt: skip
    one, other = critic("a", "b"), critic("a", "b")
    for _ in range(2):
        one.learn(some)
        random.Random(3).shuffle(some)
        other.learn(some)
    assert same(one.state_dict(), other.state_dict())


def test_a_new_policy_changes_no_other_and_begins_as_the_mean() -> None:
    made = critic("a", "b")
    made.learn([lesson("a", 1), lesson("b", 1, size=3.0)])
    t = lived("a", cut=True)
    before = made.of(t)
    made.add_policy(task("new"))
    after = made.of(t)
    assert torch.equal(before.values, after.values)
    assert torch.equal(before.cut_values, after.cut_values)
    heads, embeddings = made.net.all_heads(), list(made.net.embeddings)
    assert torch.allclose(heads[2].weight, (heads[0].weight + heads[1].weight) / 2)
    assert torch.allclose(embeddings[2], (embeddings[0] + embeddings[1]) / 2)
    assert made.policies == ("a", "b", "new")


def test_a_policy_that_sends_nothing_keeps_its_head() -> None:
    """Not even Adam's momentum moves it."""
    made = critic("a", "b")
    one, other = lesson("a", 1), lesson("b", 1)
    made.learn([one, other], targets=[one.rewards, other.rewards])
    head = made.net.all_heads()[1].weight.detach().clone()
    embedding = made.net.embeddings[1].detach().clone()
    made.learn([one], targets=[one.rewards])
    assert torch.equal(made.net.all_heads()[1].weight, head)
    assert torch.equal(made.net.embeddings[1], embedding)


def test_policy_identity_lets_it_learn_opposites() -> None:
    probe = lived("up", seed=77)
    wanted = probe.observations[..., 0] + 0.5 * probe.observations[..., 1]
    errors = {}
    for kind in ("pooled", "unconditioned"):
        made = critic("up", "down", kind=kind, critic_lr=1e-2)
        for step in range(1, 21):
            same_seen = lesson("up", step)
            opposite = lesson("up", step, size=-1.0)
            opposite.policy = opposite.actor = "down"
            made.learn([same_seen, opposite])
        errors[kind] = float((made.of(probe).values - wanted).square().mean() / wanted.var())
    assert errors["pooled"] < 0.1
    # Both learn opposite values of the same states: the mixture is zero everywhere.
    assert 0.8 < errors["unconditioned"] < 1.3


@pytest.mark.parametrize("share", [1, 10])
def test_a_policy_weighs_the_same_whatever_it_sends(share: int) -> None:
    """Two opposite targets for one head: the answer is half way, also with ten times as much."""
    made = critic("up", "down", kind="unconditioned", critic_lr=1e-2)
    for step in range(1, 17):
        up = lived("up", seed=step, columns=share * 2, ends=1.1, rewards=torch.ones_like)
        down = lived("down", seed=step, columns=2, ends=1.1, rewards=torch.zeros_like)
        up.rewards, down.rewards = up.rewards[..., 0], down.rewards[..., 0]
        made.learn([up, down])
    assert float(made.of(lived("up")).values.mean()) == pytest.approx(0.5, abs=0.1)


def test_an_interrupted_critic_goes_on_as_if_it_had_not_stopped() -> None:
    straight, broken = critic("a"), critic("a")
    for made in (straight, broken):
        made.learn([lesson("a", 1)])
        made.add_policy(task("wide", observation=(5,)))
        made.learn([lesson("a", 2), lived("wide", features=5)])
    again = critic(seed=99)
    again.load_state_dict(broken.state_dict())
    for made in (straight, again):
        made.add_policy(task("c"))
        made.learn([lesson("a", 3), lived("wide", features=5, seed=3), lesson("c", 3)])
    assert again.version == 3
    assert same(straight.state_dict(), again.state_dict())


def test_a_snapshot_answers_as_its_critic() -> None:
    learner, actor = critic("a", "b"), critic("b", seed=5)
    learner.learn([lesson("a", 1), lesson("b", 1, size=7.0)])
    actor.load_snapshot(learner.snapshot())
    t = lived("b", cut=True)
    assert torch.equal(actor.of(t).values, learner.of(t).values)
    assert actor.of(t).version == 1
    learner.learn([lesson("a", 2)])
    actor.load_snapshot(learner.snapshot())
    assert torch.equal(actor.of(t).cut_values, learner.of(t).cut_values)


def test_an_actor_the_critic_has_not_met_is_answered_by_the_mean() -> None:
    learner, actor = critic("a", "b"), critic("new")
    learner.learn([lesson("a", 1), lesson("b", 1)])
    actor.load_snapshot(learner.snapshot())
    learner.add_policy(task("new"))
    t = lived("new")
    assert torch.equal(actor.of(t).values, learner.of(t).values)


def test_targets_may_be_given_in_the_order_of_the_trajectories() -> None:
    made = critic("a", "b", critic_lr=1e-2)
    for step in range(1, 17):
        some = [lesson("b", step), lesson("a", step)]
        goals = [torch.full((8, 8), 40.0) + some[0].rewards, torch.full((8, 8), -3.0)]
        made.learn(some, targets=goals)
    assert float(made.of(lived("b")).values.mean()) == pytest.approx(40.0, abs=1.0)
    assert float(made.of(lived("a")).values.mean()) == pytest.approx(-3.0, abs=0.5)


def test_nothing_learned_is_an_update_too() -> None:
    made = critic("a")
    assert made.learn([]) == {}
    assert made.version == 1


def test_a_policy_it_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'stranger'.*'a'"):
        critic("a").of(lived("stranger"))


def test_a_policy_that_changed_its_spaces_is_refused() -> None:
    made = critic("a")
    made.add_policy(task("a"))
    with pytest.raises(ConfigError, match=r"\(5,\).*\(3,\)"):
        made.add_policy(task("a", observation=(5,)))


def test_a_critic_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="critic_hidden"):
        critic("a", critic_hidden=[])


def test_weights_of_another_kind_or_width_are_refused() -> None:
    made = critic("a")
    with pytest.raises(CheckpointCorrupt, match="unconditioned"):
        made.load_snapshot(critic("a", kind="unconditioned").snapshot())
    with pytest.raises(CheckpointCorrupt, match="widths"):
        made.load_snapshot(critic("a", critic_hidden=[8, 8]).snapshot())
    with pytest.raises(CheckpointCorrupt, match="not the weights of a critic"):
        made.load_snapshot({"other": torch.zeros(1)})


@pytest.mark.parametrize("policies", [("a",), ("b", "c")])
def test_refused_weights_leave_the_last_ones(policies: tuple[str, ...]) -> None:
    made = critic("a")
    made.learn([lesson("a", 1)])
    before, t = made.state_dict(), lived("a")
    values = made.of(t).values
    with pytest.raises(CheckpointCorrupt, match="widths"):
        made.load_snapshot(critic(*policies, critic_hidden=[9, 9]).snapshot())
    assert torch.equal(made.of(t).values, values)
    assert made.state_dict().keys() == before.keys()
    assert all(torch.equal(before[k], v) for k, v in made.state_dict().items() if k != "generator")


@pytest.mark.parametrize("kind", ["pooled", "unconditioned", "own"])
def test_one_hidden_layer_is_enough(kind: str) -> None:
    made = critic("a", kind=kind, critic_hidden=[16], critic_lr=1e-2)
    for step in range(1, 17):
        stats = made.learn([lesson("a", step)])
    assert stats["a"]["explained_variance"] > 0.8


def test_encoders_are_shared_by_environment() -> None:
    made = Critic(table(), seed=0, kind="pooled")
    for name, env in (("a", "pole"), ("b", "pole"), ("c", "cart")):
        made.add_policy(task(name, env=env))
    assert len(made.net.encoders) == 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e20])
def test_values_that_make_no_sense_are_named_and_ruin_no_other(
    wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    made = critic("a", "b")
    bad = lesson("b", 1)
    bad.rewards[3, 2] = wrong
    assert made.learn([lesson("a", 1), bad]).keys() == {"a"}
    assert made.refused == 1
    assert "policy b, actor b, trajectory 1" in caplog.text
    assert "step 3, column 2" in caplog.text
    assert torch.isfinite(made.of(lived("a")).values).all()
    assert made.learn([lesson("a", 2), lesson("b", 2)]).keys() == {"a", "b"}


def test_a_step_with_gradients_not_finite_is_left_out() -> None:
    made = critic("a")
    made.learn([lived("a")])
    before = {name: value.clone() for name, value in made.net.named_parameters()}
    hooks = [
        p.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        for p in made.net.parameters()
    ]
    stats = made.learn([lived("a")], targets=[made.of(lived("a")).values[:-1]])
    for hook in hooks:
        hook.remove()
    assert all(p.isfinite().all() for p in made.net.parameters())
    made.learn([lived("a")])
    assert all(p.isfinite().all() for p in made.net.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in made.net.named_parameters())
    assert stats["a"]["value_loss"] >= 0.0
