import torch

from atoll.rl.algorithms.replay import AT_MOST, FORGOTTEN, KEPT, ReplayBuffer
from atoll.rl.critic.critic import Critic
from tests.rl.lived import lived, table, task


def test_absent_policys_last_data_is_rehearsed() -> None:
    made = ReplayBuffer()
    slow = [lived("slow", sequence=n) for n in range(1, 6)]
    made.keep([*slow, lived("fast")], update=0)
    assert made.absent([lived("fast"), lived("slow")], update=1) == []
    again = made.absent([lived("fast")], update=1)
    assert [t.sequence for t in again] == [5 - KEPT + 1 + n for n in range(KEPT)]
    assert all(t.policy == "slow" for t in again)


def test_a_policy_that_is_silent_for_long_is_let_go() -> None:
    made = ReplayBuffer()
    made.keep([lived("slow")], update=7)
    assert made.absent([], update=7 + FORGOTTEN)
    assert not made.absent([], update=8 + FORGOTTEN)
    made.keep([lived("fast")], update=8 + FORGOTTEN)
    kept = ReplayBuffer()
    kept.keep([lived("fast")], update=8 + FORGOTTEN)
    assert made.state_dict().keys() == kept.state_dict().keys(), "its data is not saved any more"


def test_a_large_pool_is_rehearsed_in_turn() -> None:
    made = ReplayBuffer()
    names = {f"p{n}" for n in range(3 * AT_MOST)}
    made.keep([lived(name) for name in sorted(names)], update=0)
    rehearsed = [made.absent([], update=update) for update in (1, 2, 3)]
    assert [len({t.policy for t in some}) for some in rehearsed] == [AT_MOST] * 3
    assert {t.policy for some in rehearsed for t in some} == names


def test_it_goes_on_from_its_state() -> None:
    one, other = ReplayBuffer(), ReplayBuffer()
    for update, name in enumerate(("a", "b", "a")):
        one.keep([lived(name, cut=True, sequence=update)], update=update)
    other.load_state_dict(one.state_dict())
    for made in (one, other):
        made.keep([lived("c")], update=3)
    for wanted, found in zip(
        one.absent([], update=4), other.absent([], update=4), strict=True
    ):  # fmt: skip
        assert (wanted.policy, wanted.sequence) == (found.policy, found.sequence)
        assert torch.equal(wanted.observations, found.observations)
        assert torch.equal(wanted.cut_observations, found.cut_observations)
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def slow_error(*, remembers: bool) -> float:
    """Return how wrong a slow policy's values are that sends once in twelve updates."""
    made = Critic(table(critic_lr=3e-3, critic_epochs=6), seed=0, kind="pooled")
    for name in ("slow", "fast"):
        made.add_policy(task(name))
    for step in range(48):
        slow = step % 12 == 0
        t = lived("slow" if slow else "fast", seed=step, sequence=step, columns=8, ends=1.1)
        seen = t.observations[:-1]
        t.rewards = (-2.0 if slow else 5.0) * seen[..., 0] * seen[..., 1]
        # Targets that are given are learned alone.
        made.learn([t], targets=None if remembers else [t.rewards])
    probe = lived("slow", seed=999)
    wanted = -2.0 * probe.observations[..., 0] * probe.observations[..., 1]
    return float((made.of(probe).values - wanted).square().mean() / wanted.var())


def test_a_fast_policy_does_not_drown_a_slow_one() -> None:
    assert slow_error(remembers=True) < 0.6 * slow_error(remembers=False)
