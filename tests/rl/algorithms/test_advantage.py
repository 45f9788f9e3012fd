"""Advantages: the limits of GAE, ends of episodes, and what V-trace converges to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.rl.algorithms.losses import backward_sum, gae, n_step, vtrace
from atoll.rl.trajectory import ValuedSteps

T, B = 7, 3
GAMMA = 0.9


class Steps:
    """Random steps in doubles; one column is never interrupted."""

    def __init__(self, *, ends: bool = True) -> None:
        draw = torch.Generator().manual_seed(2)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.rewards, self.values = numbers(T, B), numbers(T, B)
        self.following = torch.cat([self.values[1:], numbers(1, B)])
        self.terminated = torch.zeros(T, B, dtype=torch.bool)
        self.truncated = torch.zeros(T, B, dtype=torch.bool)
        self.log_ratios = 0.5 * numbers(T, B)
        if ends:
            self.terminated[2, 0] = self.terminated[6, 1] = self.truncated[4, 1] = True
            self.following[4, 1] = 5.0  # the value of what was cut off

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def parts(self) -> ValuedSteps:
        return ValuedSteps(self.rewards, self.values, self.following, self.terminated, self.ended)


def by_hand(steps: Steps, *, lam: float) -> Tensor:
    """Return GAE as the sum over all later errors of the same episode, step by step."""
    found = torch.zeros(T, B, dtype=torch.float64)
    for column in range(B):
        for start in range(T):
            weight = 1.0
            for t in range(start, T):
                alive = 0.0 if steps.terminated[t, column] else 1.0
                error = steps.rewards[t, column] - steps.values[t, column]
                error = error + GAMMA * alive * steps.following[t, column]
                found[start, column] += weight * error
                weight *= GAMMA * lam
                if steps.ended[t, column]:
                    break
    return found


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_the_weighted_sum_of_later_errors(lam: float) -> None:
    steps = Steps()
    advantages, targets = gae(steps.parts, gamma=GAMMA, lam=lam)
    torch.testing.assert_close(advantages, by_hand(steps, lam=lam), atol=1e-12, rtol=0)
    torch.testing.assert_close(targets, advantages + steps.values, atol=1e-12, rtol=0)


def test_lambda_zero_is_one_step_of_temporal_difference() -> None:
    steps = Steps()
    _, targets = gae(steps.parts, gamma=GAMMA, lam=0.0)
    alive = (~steps.terminated).double()
    torch.testing.assert_close(targets, steps.rewards + GAMMA * alive * steps.following)


def test_lambda_one_is_monte_carlo() -> None:
    steps = Steps()
    _, targets = gae(steps.parts, gamma=GAMMA, lam=1.0)
    # The first column's episode ends at step 2: discounted rewards and nothing else.
    rewards = steps.rewards[:, 0]
    assert float(targets[0, 0]) == pytest.approx(
        float(rewards[0] + GAMMA * rewards[1] + GAMMA**2 * rewards[2]), abs=1e-12
    )
    # The last column never ends: rewards, and the value of where it stands then.
    total = sum(float(r) * GAMMA**t for t, r in enumerate(steps.rewards[:, 2]))
    total += GAMMA**T * float(steps.following[-1, 2])
    assert float(targets[0, 2]) == pytest.approx(total, abs=1e-12)
    _, returns = n_step(steps.parts, gamma=GAMMA)
    assert torch.equal(returns, targets)


def test_only_truncated_episodes_bootstrap() -> None:
    steps = Steps()
    _, targets = gae(steps.parts, gamma=GAMMA, lam=0.95)
    assert float(targets[4, 1]) == pytest.approx(float(steps.rewards[4, 1]) + GAMMA * 5.0)
    assert float(targets[2, 0]) == pytest.approx(float(steps.rewards[2, 0]))
    # Nothing of the next episode flows back, whatever it brings.
    steps.rewards[5:, 1] += 100.0
    steps.rewards[3:, 0] += 100.0
    _, later = gae(steps.parts, gamma=GAMMA, lam=0.95)
    assert torch.equal(later[:5, 1], targets[:5, 1])
    assert torch.equal(later[:3, 0], targets[:3, 0])


def test_every_column_may_have_its_own_discount() -> None:
    steps = Steps()
    gammas, lams = torch.tensor([0.9, 0.5, 0.99]).double(), torch.tensor([1.0, 0.3, 0.7]).double()
    together, _ = gae(steps.parts, gamma=gammas, lam=lams)
    for column in range(B):
        alone, _ = gae(
            ValuedSteps(*(part[:, column : column + 1] for part in steps.parts)),
            gamma=float(gammas[column]), lam=float(lams[column]),
        )  # fmt: skip
        torch.testing.assert_close(together[:, column : column + 1], alone, atol=1e-12, rtol=0)


def test_a_backward_sum_is_what_it_says() -> None:
    terms, factors = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [2.0], [9.0]])
    assert backward_sum(terms, factors).flatten().tolist() == [5.0, 8.0, 3.0]


# ------------------------------------------------------------------------------------- V-trace


def test_on_the_own_policy_vtrace_is_gae() -> None:
    steps = Steps()
    zeros = torch.zeros_like(steps.log_ratios)
    for lam in (0.0, 0.7, 1.0):
        targets, advantages = vtrace(zeros, steps.parts, gamma=GAMMA, lam=lam)
        _, wanted = gae(steps.parts, gamma=GAMMA, lam=lam)
        torch.testing.assert_close(targets, wanted, atol=1e-12, rtol=0)
        if lam == 1.0:
            torch.testing.assert_close(advantages, targets - steps.values, atol=1e-12, rtol=0)


def test_on_policy_lambda_one_is_the_n_step_return() -> None:
    steps = Steps(ends=False)
    targets, _ = vtrace(torch.zeros(T, B).double(), steps.parts, gamma=GAMMA)
    for start in range(T):
        wanted = GAMMA ** (T - start) * steps.following[-1]
        for t in range(start, T):
            wanted = wanted + GAMMA ** (t - start) * steps.rewards[t]
        torch.testing.assert_close(targets[start], wanted, atol=1e-12, rtol=0)


def test_vtrace_is_the_sum_over_clipped_traces() -> None:
    steps, lam, rho_clip, c_clip = Steps(), 0.8, 1.2, 0.9
    targets, advantages = vtrace(
        steps.log_ratios, steps.parts, gamma=GAMMA, lam=lam, rho_clip=rho_clip, c_clip=c_clip
    )
    ratios = steps.log_ratios.exp()
    for column in range(B):
        for start in range(T):
            total, weight = steps.values[start, column].clone(), 1.0
            for t in range(start, T):
                alive = 0.0 if steps.terminated[t, column] else 1.0
                error = steps.rewards[t, column] - steps.values[t, column]
                error = error + GAMMA * alive * steps.following[t, column]
                total += weight * min(rho_clip, float(ratios[t, column])) * error
                weight *= GAMMA * lam * min(c_clip, float(ratios[t, column]))
                if steps.ended[t, column]:
                    break
            assert float(targets[start, column]) == pytest.approx(float(total), abs=1e-12)
    # The policy's advantage looks one step ahead, to the next target where there is one.
    rho = float(ratios[0, 2].clamp(max=rho_clip))
    wanted = rho * (steps.rewards[0, 2] + GAMMA * targets[1, 2] - steps.values[0, 2])
    assert float(advantages[0, 2]) == pytest.approx(float(wanted), abs=1e-12)
    rho = float(ratios[4, 1].clamp(max=rho_clip))
    wanted = rho * (steps.rewards[4, 1] + GAMMA * 5.0 - steps.values[4, 1])
    assert float(advantages[4, 1]) == pytest.approx(float(wanted), abs=1e-12)


class Tabular:
    """Three states, two actions, known chances: every value can be solved for."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(8)
        chances = torch.rand(3, 2, 3, generator=draw, dtype=torch.float64)
        self.moves = chances / chances.sum(-1, keepdim=True)  # [s, a, s']
        self.rewards = torch.randn(3, 2, generator=draw, dtype=torch.float64)
        self.mu = torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
        self.pi = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)

    def value(self, policy: Tensor) -> Tensor:
        """Return V of a policy, from its Bellman equation."""
        moves = torch.einsum("sa,sat->st", policy, self.moves)
        rewards = (policy * self.rewards).sum(-1)
        solved: Tensor = torch.linalg.solve(torch.eye(3).double() - GAMMA * moves, rewards)
        return solved

    def towards(self, rho_clip: float) -> Tensor:
        """Return the policy whose value V-trace finds: min(ρ̄ μ, π), made a distribution."""
        clipped = torch.minimum(rho_clip * self.mu, self.pi)
        return clipped / clipped.sum(-1, keepdim=True)

    def expected_target(self, values: Tensor, *, rho_clip: float, length: int) -> Tensor:
        """Return E[v_s] over all paths of `length` steps from each state, by enumeration."""
        found = torch.zeros(3, dtype=torch.float64)
        ratios = (self.pi / self.mu).log()
        for start in range(3):
            paths: list[tuple[float, list[int], list[int]]] = [(1.0, [start], [])]
            for _ in range(length):
                paths = [
                    (p * float(self.mu[s[-1], a] * self.moves[s[-1], a, t]), [*s, t], [*done, a])
                    for p, s, done in paths
                    for a in range(2)
                    for t in range(3)
                ]
            states = torch.tensor([s for _, s, _ in paths]).T  # [length + 1, paths]
            actions = torch.tensor([done for _, _, done in paths]).T
            never = torch.zeros(actions.shape, dtype=torch.bool)
            targets, _ = vtrace(
                ratios[states[:-1], actions],
                ValuedSteps(
                    self.rewards[states[:-1], actions],
                    values[states[:-1]], values[states[1:]], never, never,
                ),
                gamma=GAMMA, rho_clip=rho_clip, c_clip=min(1.0, rho_clip),
            )  # fmt: skip
            weights = torch.tensor([p for p, _, _ in paths], dtype=torch.float64)
            found[start] = (weights * targets[0]).sum()
        return found


@pytest.mark.parametrize("rho_clip", [0.5, 1.0, 1.4, 10.0])
def test_vtrace_stands_still_at_the_value_of_the_clipped_policy(rho_clip: float) -> None:
    world = Tabular()
    # The targets are an affine function of the values: A v + b. Its fixed point is solved for.
    start = world.expected_target(torch.zeros(3).double(), rho_clip=rho_clip, length=3)
    columns = [
        world.expected_target(unit, rho_clip=rho_clip, length=3) - start
        for unit in torch.eye(3).double()
    ]
    step = torch.stack(columns, dim=1)
    assert float(torch.linalg.eigvals(step).abs().max()) < 1.0  # so repeating it leads there
    found = torch.linalg.solve(torch.eye(3).double() - step, start)
    wanted = world.value(world.towards(rho_clip))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_that_policy_is_the_acting_one_the_learners_or_between() -> None:
    world = Tabular()
    torch.testing.assert_close(world.towards(100.0), world.pi)  # no clipping: the learner's
    torch.testing.assert_close(world.towards(1e-6), world.mu)  # all clipped: the acting one
    middle = world.value(world.towards(1.0))
    ends = torch.stack([world.value(world.mu), world.value(world.pi)])
    assert ((middle > ends.amin(0)) & (middle < ends.amax(0))).all()
