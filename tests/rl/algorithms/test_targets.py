import pytest
import torch
from torch import Tensor

from atoll.rl.algorithms.targets import corrected_targets, own_targets
from atoll.rl.trajectory import Trajectory, ValuedTrajectory
from tests.rl.lived import lived


def valued(trajectory: Trajectory, *, seed: int = 5) -> ValuedTrajectory:
    generator = torch.Generator().manual_seed(seed)
    length, columns = trajectory.rewards.shape
    values = torch.randn(length + 1, columns, generator=generator)
    return ValuedTrajectory(values, torch.randn(len(trajectory.cut_at), generator=generator), 1)


def by_hand(t: Trajectory, v: ValuedTrajectory, *, gamma: float, lam: float) -> Tensor:
    """Return targets step by step: one column, one number after the other, in double."""
    out = torch.zeros(t.rewards.shape, dtype=torch.float64)
    cut = {(int(s), int(c)): float(x) for (s, c), x in zip(t.cut_at, v.cut_values, strict=True)}
    for column in range(t.rewards.shape[1]):
        after = 0.0
        for step in reversed(range(len(t.rewards))):
            here = (step, column)
            following = cut.get(here, float(v.values[step + 1, column]))
            if t.terminated[here]:
                following = 0.0
            error = float(t.rewards[here]) + gamma * following - float(v.values[here])
            after = error + (0.0 if bool(t.ended[here]) else gamma * lam * after)
            out[here] = after + float(v.values[here])
    return out


def test_each_policy_has_its_own_discount_and_its_own_length() -> None:
    some = [
        lived("a", seed=1, cut=True), lived("b", seed=2, columns=2, cut=True),
        lived("a", seed=3, length=5), lived("c", seed=4, length=5, cut=True),
    ]  # fmt: skip
    answers = [valued(t, seed=i) for i, t in enumerate(some)]
    gammas = {"a": 0.9, "b": 0.5, "c": 1.0}
    found = own_targets(some, answers, gammas=gammas, lam=0.8)
    for t, v, targets in zip(some, answers, found, strict=True):
        wanted = by_hand(t, v, gamma=gammas[t.policy], lam=0.8)
        assert torch.allclose(targets.double(), wanted, atol=1e-5)


def test_terminated_state_is_worth_its_reward() -> None:
    t = lived("a", length=1, columns=2, ends=0.0)
    t.terminated[0, 0] = True
    t.truncated[0, 1] = True
    t.cut_at, t.cut_observations = torch.tensor([[0, 1]]), torch.zeros(1, 3)
    answer = ValuedTrajectory(torch.full((2, 2), 50.0), torch.tensor([7.0]), 1)
    (targets,) = own_targets([t], [answer], gammas={"a": 0.5}, lam=1.0)
    assert float(targets[0, 0]) == pytest.approx(float(t.rewards[0, 0]))
    assert float(targets[0, 1]) == pytest.approx(float(t.rewards[0, 1]) + 3.5)


class Likes:
    """A policy that takes action 1 with one probability everywhere."""

    def __init__(self, probability: float) -> None:
        self.probability = torch.tensor(probability)

    def evaluate(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        chosen = trajectory.actions[..., 0] == 1
        likely = torch.where(chosen, self.probability, 1.0 - self.probability).log()
        return likely, torch.zeros_like(likely)


def test_the_same_policy_needs_no_correction() -> None:
    t = lived("a", cut=True)
    answer = valued(t)
    wanted = by_hand(t, answer, gamma=0.9, lam=0.7)
    for policy in (None, Likes(0.5)):
        found = corrected_targets(
            t, answer, policy=policy, gamma=0.9, lam=0.7, rho_clip=1.0, c_clip=1.0
        )
        assert torch.allclose(found.double(), wanted, atol=1e-5)


def test_what_the_policy_never_does_teaches_it_nothing() -> None:
    t = lived("a", ends=0.0)
    t.actions.fill_(0)
    answer = valued(t)
    found = corrected_targets(
        t, answer, policy=Likes(1.0), gamma=0.9, lam=1.0, rho_clip=1.0, c_clip=1.0
    )
    assert torch.allclose(found, answer.values[:-1])
