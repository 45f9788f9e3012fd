"""A whole update of PPO against an independent one: numpy doubles, explicit loops.

Nothing here but the order of minibatches comes from the code under test: forward and backward
passes, advantages, the loss, clipping of gradients and Adam are written out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.config.rl_tables import RlTable
from atoll.rl.algorithms.ppo import Ppo
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE
from atoll.rl.trajectory import Trajectory, ValuedTrajectory
from tests.rl.walks import SPACES, task_of, valued, walk

Array = NDArray[Any]
SETTINGS = RlTable(
    hidden=[5, 3], epochs=3, minibatches=2, entropy=0.01, lr=0.02, max_norm=0.3, clip=0.1,
    normalise=False, gae_lambda=0.9,
)  # fmt: skip
TOTAL = 96


class Reference:
    """The same policy: two layers of tanh, a head, and a deviation of continuous actions."""

    def __init__(self, ppo: Ppo, kind: str) -> None:
        self.kind, self.sizes = kind, SPACES[kind].sizes
        self.names = [name for name, _ in ppo.policy.named_parameters()]
        self.weights = {n: p.detach().numpy().copy() for n, p in ppo.policy.named_parameters()}
        self.first = {n: np.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: np.zeros_like(w) for n, w in self.weights.items()}
        self.steps = 0

    def layers(self, seen: Array) -> list[Array]:
        """Return what goes into each layer, and what comes out of the head."""
        w = self.weights
        one = np.tanh(w["body.0.weight"] @ seen + w["body.0.bias"])
        two = np.tanh(w["body.1.weight"] @ one + w["body.1.bias"])
        return [seen, one, two, w["head.weight"] @ two + w["head.bias"]]

    def choice(self, output: Array, action: Array) -> tuple[float, float, Array, Array]:
        """Return ln p, entropy, and the slopes of both by the output (and the deviation)."""
        if self.kind == CONTINUOUS:
            return self.gaussian(output, action)
        log_p, entropy, at = 0.0, 0.0, 0
        slope, spread = np.zeros_like(output), np.zeros_like(output)
        for size, chosen in zip(self.sizes, action, strict=True):
            logits = output[at : at + size]
            p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            own = -(p * np.log(p)).sum()
            log_p, entropy = log_p + np.log(p[chosen]), entropy + own
            slope[at : at + size] = -p
            slope[at + chosen] += 1.0
            spread[at : at + size] = -p * (np.log(p) + own)
            at += size
        return log_p, entropy, slope, spread

    def gaussian(self, mean: Array, action: Array) -> tuple[float, float, Array, Array]:
        s = self.weights["log_deviation"]
        z = (action - mean) / np.exp(s)
        log_p = float((-0.5 * z**2 - s - 0.5 * np.log(2 * np.pi)).sum())
        entropy = float((s + 0.5 + 0.5 * np.log(2 * np.pi)).sum())
        # The slopes by the mean, then by the log deviation.
        slope = np.concatenate([z / np.exp(s), z**2 - 1])
        return log_p, entropy, slope, np.concatenate([np.zeros_like(z), np.ones_like(z)])

    def step(self, steps: list[tuple[Array, Array, float, float]], lr: float) -> float:
        """Take one gradient step on (observation, action, ln μ, advantage); return the loss."""
        gradients = {n: np.zeros_like(w) for n, w in self.weights.items()}
        loss, share = 0.0, 1.0 / len(steps)
        for seen, action, before, advantage in steps:
            inputs = self.layers(seen)
            log_p, _, slope, spread = self.choice(inputs[3], action)
            ratio = np.exp(log_p - before)
            low, high = 1 - SETTINGS.clip, 1 + SETTINGS.clip
            loss -= share * min(ratio * advantage, min(max(ratio, low), high) * advantage)
            beyond = ratio > high if advantage > 0 else ratio < low
            back = share * ((0.0 if beyond else -advantage * ratio) * slope)
            back = back - share * SETTINGS.entropy * spread
            self.backward(inputs, back, gradients)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        scale = min(1.0, SETTINGS.max_norm / (norm + 1e-6))
        self.adam({n: scale * g for n, g in gradients.items()}, lr)
        return loss

    def backward(self, inputs: list[Array], back: Array, gradients: dict[str, Array]) -> None:
        if self.kind == CONTINUOUS:
            gradients["log_deviation"] += back[len(inputs[3]) :]
            back = back[: len(inputs[3])]
        for name, units in (
            ("head", inputs[2]),
            ("body.1", inputs[1]),
            ("body.0", inputs[0]),
        ):
            gradients[f"{name}.weight"] += np.outer(back, units)
            gradients[f"{name}.bias"] += back
            back = (self.weights[f"{name}.weight"].T @ back) * (1 - units**2)

    def adam(self, gradients: dict[str, Array], lr: float) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
            self.second[name] = 0.999 * self.second[name] + 0.001 * gradient**2
            mean = self.first[name] / (1 - 0.9**self.steps)
            square = self.second[name] / (1 - 0.999**self.steps)
            self.weights[name] = self.weights[name] - lr * mean / (np.sqrt(square) + 1e-5)


def advantages(t: Trajectory, v: ValuedTrajectory, *, gamma: float, lam: float) -> Array:
    """Return standardised GAE, by recursion over each column."""
    length, columns = t.rewards.shape
    found = np.zeros((length, columns))
    cuts = {(int(s), int(c)): float(v.cut_values[k]) for k, (s, c) in enumerate(t.cut_at)}
    for column in range(columns):
        later = 0.0
        for step in reversed(range(length)):
            following = cuts.get((step, column), float(v.values[step + 1, column]))
            if t.terminated[step, column]:
                following = 0.0
            error = float(t.rewards[step, column]) + gamma * following
            error -= float(v.values[step, column])
            if t.ended[step, column]:
                later = 0.0
            later = error + gamma * lam * later
            found[step, column] = later
    standard: Array = (found - found.mean()) / (found.std() + 1e-8)
    return standard


def minibatches(ppo: Ppo, count: int) -> Iterator[Iterator[Array]]:
    """Yield each pass's minibatches as the numbers of steps, drawn as the code draws them."""
    generator = torch.Generator()
    generator.set_state(ppo.generator.get_state())
    for _ in range(SETTINGS.epochs):
        order = torch.randperm(count, generator=generator).numpy()
        yield iter(np.array_split(order, SETTINGS.minibatches))


@pytest.mark.parametrize("kind", [DISCRETE, MULTI_DISCRETE, CONTINUOUS])
def test_two_updates_are_those_of_the_reference(kind: str) -> None:
    ppo = Ppo(task_of(kind), SETTINGS, total_steps=TOTAL, seed=4)
    ppo.policy.double()
    with torch.no_grad():
        ppo.policy.head.weight.mul_(100.0)
    reference = Reference(ppo, kind)
    for update in range(2):
        actor = copy.deepcopy(ppo.policy).float()
        trajectory = doubles(walk(actor, seed=update, length=6, columns=4))
        values = valued(trajectory, seed=update)
        values = ValuedTrajectory(values.values.double(), values.cut_values.double(), 1)
        better = advantages(trajectory, values, gamma=0.97, lam=0.9).reshape(-1)
        seen = trajectory.observations[:-1].reshape(-1, 4).numpy()
        actions = trajectory.actions.reshape(len(better), -1).numpy()
        before = trajectory.log_probabilities.reshape(-1).numpy()
        lr = SETTINGS.lr * (1 - 24 * update / TOTAL)
        losses = []
        for parts in minibatches(ppo, len(better)):
            for part in parts:
                steps = [(seen[i], actions[i], before[i], better[i]) for i in part]
                losses.append(reference.step(steps, lr))
        stats = ppo.improve(trajectory, values)
        assert stats["policy_loss"] == pytest.approx(np.mean(losses), abs=1e-10)
        assert stats["lr"] == pytest.approx(lr)
        assert stats["clip_fraction"] > 0.1  # or the clipping would not have been tested
        for name, parameter in ppo.policy.named_parameters():
            np.testing.assert_allclose(
                parameter.detach().numpy(), reference.weights[name], atol=1e-10, rtol=0
            )


def doubles(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory in double precision."""
    for name in ("observations", "log_probabilities", "rewards", "cut_observations", "actions"):
        tensor = getattr(trajectory, name)
        if tensor.is_floating_point():
            setattr(trajectory, name, tensor.double())
    return trajectory
