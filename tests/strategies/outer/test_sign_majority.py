from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.every_step import SignMajority
from atoll.strategies.vectors.exact_math import uniform
from atoll.strategies.vectors.flat import Flat
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    sgd,
    small_model,
    squared_error,
    start_run,
    train_together,
)

LR, DECAY = 0.02, 0.1
"""Of the suite's AdamW, whose own rule has no part in it."""


def raw_gradient(those: Reference, member: int) -> Tensor:
    """Return a member's own gradient in double precision."""
    model = those.models[member]
    those.optimizers[member].zero_grad()
    squared_error(model, next(those.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def signs(vector: Tensor, step: int) -> Tensor:
    """Return signs; a zero is + in even rounds and - in odd ones. Round 0 is the start."""
    tie = 1.0 if step % 2 == 0 else -1.0
    return torch.where(vector == 0, tie, vector.sign())


class TestSignMajority(StrategySuite):
    name = "sign_majority"
    options = SignMajority(momentum=0.5)
    codec = "sign"
    coarse = "sign"
    wires = ("fp32", "int8", "sign")

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, sgd)
        theta = those.vectors()[0]
        momenta = [torch.zeros_like(theta) for _ in range(members)]
        for step in range(1, steps + 1):
            for m in range(members):
                momenta[m] = 0.5 * momenta[m] + 0.5 * raw_gradient(those, m)
            vote = signs(sum((signs(m, step) for m in momenta), torch.zeros(1)), step)
            theta = (1 - LR * DECAY) * theta - LR * vote
            those.assign(theta)
        return theta

    def test_one_member_equals_plain_training_bit_for_bit(self) -> None:
        """One member's vote is a sign too: it trains by signs, not by gradients as they are."""
        for group in (SingleGroup(), MemoryGroups(1)[0]):
            run = start_run(self.options, group, 0)
            run.train(self.steps)
            expected = self.reference(1, self.steps)
            assert (run.vector().double() - expected).abs().max() < self.tolerance


class TestSignsWithFeedback(StrategySuite):
    """With a scale, and memory on both sides."""

    name = "sign_feedback"
    options = SignMajority(feedback=True)
    codec = "sign"
    coarse = "sign"
    wires = ("fp32", "int8", "sign")

    def reference(self, members: int, steps: int) -> Tensor:
        """With the identity for a codec: plain SGD on the mean gradient."""
        those = Reference.make(members, sgd)
        theta = those.vectors()[0]
        for _ in range(steps):
            mean = sum((raw_gradient(those, m) for m in range(members)), torch.zeros(1)) / members
            theta = (1 - LR * DECAY) * theta - LR * mean
            those.assign(theta)
        return theta

    def test_one_member_equals_plain_training_bit_for_bit(self) -> None:
        """The method is SGD, without clipping, when there is no member to send signs to."""
        for group in (SingleGroup(), MemoryGroups(1)[0]):
            run = start_run(self.options, group, 0, optimizer=sgd, clip=0.0)
            run.train(self.steps)
            assert (run.vector() - sgd_training(self.steps)).abs().max() < 1e-7


def sgd_training(steps: int) -> Tensor:
    model = small_model()
    optimizer, those = sgd(model), Reference.make(1, sgd)
    for _ in range(steps):
        optimizer.zero_grad()
        squared_error(model, next(those.streams[0]))[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("members", [2, 3, 4])
def test_one_bit_per_vote_gives_what_32_bits_give(members: int) -> None:
    """Ties and zeros fall the same way whatever carries the votes."""
    coarse, exact = (
        train_together(SignMajority(), members=members, steps=8, codec=codec)
        for codec in ("sign", "fp32")
    )
    assert torch.equal(coarse[0].vector(), exact[0].vector())


def test_step_length_is_the_rate_without_clipping() -> None:
    runs = train_together(
        SignMajority(), members=3, steps=4, optimizer=sgd, codec="sign", clip=1e-3
    )
    before = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    for after in runs[0].rounds:
        assert ((after - before).abs() - 0.05).abs().max() < 1e-6
        before = after


def test_values_without_gradients_stay_within_one_step() -> None:
    class Half(nn.Module):
        """Uses only the first of its two numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Parameter(torch.tensor([1.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.numbers[:1] * x[:, :1] * torch.ones(1, 2)

    def body(group: Group) -> list[float]:
        run = start_run(SignMajority(), group, 0, optimizer=sgd, codec="sign", model=Half())
        run.train(9)
        return [float(vector[1]) for vector in run.rounds]

    for places in MemoryGroups(2).together(body):
        assert max(abs(place - 1.0) for place in places) < 0.051


def test_feedback_converges_where_the_plain_vote_fails() -> None:
    """One large gradient against two small ones: the majority walks away from the minimum."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return self.at * x

    def body(group: Group, *, feedback: bool) -> float:
        options = SignMajority(feedback=feedback)
        pull = torch.tensor([[4.0, -1.0, -1.0][int(group.me[1:])]])
        run = start_run(options, group, 0, optimizer=sgd, codec="sign", model=Point(), clip=0.0)
        for _ in range(40):
            parameter = run.task.parameters()[0]
            parameter.grad = pull * (2.0 if parameter.item() > 0 else 1.0)
            run.outer.gradients(run.task)
            run.task.advance()
        return run.task.parameters()[0].item()

    plain = MemoryGroups(3).together(lambda group: body(group, feedback=False))
    fed_back = MemoryGroups(3).together(lambda group: body(group, feedback=True))
    assert plain[0] > 2.0, "the sum of all pulls is downwards, the majority's is upwards"
    assert fed_back[0] < 0.0


def test_with_feedback_nothing_is_lost_on_either_side() -> None:
    """At rate 1 without decay, the way the parameters went is what was received in all."""
    steps, members = 6, 3
    gradients = {(m, t): uniform(26, seed=10 * m + t) for m in range(members) for t in range(steps)}

    def body(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        options, slot = SignMajority(feedback=True), int(group.me[1:])
        run = start_run(options, group, slot, codec="sign", optimizer=whole_steps)
        before = run.vector().double()
        for step in range(steps):
            flat = Flat(run.task.parameters())
            for parameter, part in zip(
                flat.tensors, flat.views(gradients[slot, step]), strict=True
            ):
                parameter.grad = part.clone()
            run.outer.gradients(run.task)
            run.task.advance()
        return before - run.vector().double(), run.outer.state_dict()

    results = MemoryGroups(members).together(body)
    given = torch.stack(list(gradients.values())).double().sum(0) / members
    owed = sum((state["own.error"].double() / members for _, state in results), torch.zeros(1))
    answers = sum((state["own.owed"].double() for _, state in results), torch.zeros(1))
    assert answers.abs().max() > 1e-3
    assert (results[0][0] + owed + answers - given).abs().max() < 1e-5


def whole_steps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("codec", ["feedback(sign)", "topk:0.5"])
def test_codecs_that_remember_or_leave_out_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="signSGD cannot use codec"):
        start_run(SignMajority(), MemoryGroups(1)[0], 0, codec=codec)


@pytest.mark.parametrize(
    "options", [SignMajority(momentum=1.0), SignMajority(momentum=-0.1), SignMajority(weight="x")]
)
def test_options_out_of_range_are_refused(options: SignMajority) -> None:
    with pytest.raises(ConfigError):
        options.build()
