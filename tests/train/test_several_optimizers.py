"""A generator and a discriminator as one replica: two optimizers in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import atoll
from atoll.checkpoint import DirectoryStore, Extras, adopt, resume
from atoll.errors import ConfigError
from atoll.group.aggregation import Aggregation
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.agreement import Agreement
from atoll.train.state.saving import Saving
from tests.contracts.strategy_suite import adamw, small_model
from tests.integrations.examples import take_over

EVERY, STEPS = 3, 8
OUTER = atoll.DiLoCo(every=EVERY, outer_lr=0.5, outer_momentum=0.5)


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():  # members run in threads that share a generator
            parameter.copy_(torch.linspace(-0.5, 0.4, parameter.numel()).view_as(parameter))
    return model


@dataclass
class Gan:
    """Learns to draw pairs of numbers."""

    generator: nn.Module
    discriminator: nn.Module

    @classmethod
    def new(cls) -> Gan:
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        return cls(filled(nn.Linear(3, 2)), filled(net))

    @property
    def models(self) -> list[nn.Module]:
        return [self.discriminator, self.generator]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
            torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9),
        ]

    def vector(self) -> Tensor:
        state = {
            f"{i}.{k}": v for i, m in enumerate(self.models) for k, v in m.state_dict().items()
        }
        return torch.cat([v.flatten() for v in state.values() if v.is_floating_point()])

    def train(
        self, optimizers: Sequence[Any], *, slot: int = 0, start: int = 0, steps: int = STEPS,
        scaler: GradScaler | None = None, critic_steps: int = 2,
    ) -> Tensor:  # fmt: skip
        """Take some steps of the discriminator before every one of the generator."""
        scaler = scaler or GradScaler("cpu", enabled=False)
        ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
        judge = nn.functional.binary_cross_entropy_with_logits
        for step in range(start, steps):
            noise = torch.Generator().manual_seed(100 * slot + step)
            for turn in range(critic_steps + 1):
                made = self.generator(torch.randn(6, 3, generator=noise))
                optimizer = optimizers[turn == critic_steps]
                optimizer.zero_grad()
                if turn < critic_steps:
                    real = torch.randn(6, 2, generator=noise) + slot
                    loss = judge(self.discriminator(real), ones)
                    loss = loss + judge(self.discriminator(made.detach()), zeros)
                else:
                    loss = judge(self.discriminator(made), ones)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
        return self.vector()


def make_run(folder: Path, group: Group | None = None) -> Run:
    group = group or SingleGroup()
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=2))


def wrapped(run: Run, gan: Gan, *, outer: Any = OUTER) -> list[Any]:
    return list(run.wrap(gan.models, gan.optimizers(), outer=outer))


@pytest.mark.parametrize("scaled", [False, True])
def test_one_member_equals_the_plain_loop_bit_for_bit(tmp_path: Path, scaled: bool) -> None:
    plain, ours = Gan.new(), Gan.new()
    expected = plain.train(plain.optimizers())
    run = make_run(tmp_path)
    scaler = GradScaler("cpu", init_scale=2.0**9, enabled=scaled)
    found = ours.train(wrapped(run, ours, outer="local-sgd"), scaler=scaler)
    assert torch.equal(expected, found)
    assert run.step == STEPS  # those of the generator


@pytest.mark.parametrize("critic_steps", [(2, 2), (1, 3)])
def test_members_end_with_the_same_two_models(
    tmp_path: Path, critic_steps: tuple[int, int]
) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, int]:
        gan = Gan.new()
        with make_run(tmp_path, group) as run:
            own = gan.train(wrapped(run, gan), slot=run.slot, critic_steps=critic_steps[run.slot])
            run.finish()
            return own, gan.vector(), run.group.committed_round

    (own, first, rounds), (_, second, others) = MemoryGroups(2).together(body)
    assert torch.equal(first, second)
    assert not torch.equal(first, own)  # two steps of each were left
    assert rounds == others == 4  # the start, after 3 and 6 steps of the generator, the end


def test_agreed_parameters_are_those_of_both_models(tmp_path: Path) -> None:
    gan, run = Gan.new(), make_run(tmp_path)
    optimizers = wrapped(run, gan)
    start = gan.vector()
    own = gan.train(optimizers, steps=EVERY - 1)
    with run.evaluating():
        agreed = gan.vector()
    assert torch.equal(gan.vector(), own)
    trained = [p.numel() for m in gan.models for p in m.parameters()]
    assert not torch.equal(own, start)
    assert sum(trained) + 8 == len(start)  # BatchNorm's running means and variances
    assert torch.equal(agreed, start)


def test_an_overflow_skips_the_step_of_one_optimizer(tmp_path: Path) -> None:
    gan, run = Gan.new(), make_run(tmp_path)
    critic, maker = wrapped(run, gan)
    scaler, before = GradScaler("cpu"), gan.vector()
    loss = gan.discriminator(torch.ones(6, 2)).sum() * float("inf")
    scaler.scale(loss).backward()
    scaler.step(critic)
    assert critic.skipped
    assert not maker.skipped
    assert torch.equal(gan.vector()[:5], before[:5])
    assert run.step == 0


def test_a_member_that_recovers_gets_all_models_and_optimizers(tmp_path: Path) -> None:
    donor, late = Gan.new(), Gan.new()
    run, other = make_run(tmp_path), make_run(tmp_path)
    theirs, ours = wrapped(run, donor), wrapped(other, late)
    late.train(ours, slot=5, steps=1)
    donor.train(theirs, steps=2 * EVERY)
    take_over(other, run)
    assert other.step == 2 * EVERY
    assert torch.equal(donor.vector(), late.vector())
    expected = donor.train(theirs, start=6, steps=11)
    assert torch.equal(expected, late.train(ours, start=6, steps=11))


def test_a_job_resumes_bit_for_bit_from_a_round(tmp_path: Path) -> None:
    store, gan, run = DirectoryStore(tmp_path), Gan.new(), make_run(tmp_path)
    optimizers = wrapped(run, gan)
    after, saving = optimizers[-1]._after_step, Saving(store)

    def save(sync: Any) -> None:
        after(sync)
        if sync is not None and run.step == 2 * EVERY:
            extras, outer = Extras(strategy="diloco"), optimizers[-1].outer
            saving.save(optimizers[-1].task, outer, extras, members=("w0",), final=False)

    optimizers[-1]._after_step = save
    expected = gan.train(optimizers, steps=11)

    again, resumed = Gan.new(), make_run(tmp_path)
    others = wrapped(resumed, again)
    task, outer = others[-1].task, others[-1].outer
    restored = resume(store, store.latest(), task, strategy="diloco")
    adopt(outer, restored, strategy="diloco")
    outer.rejoin(task)
    assert isinstance(resumed.group, SingleGroup)
    resumed.group.committed_round = task.round
    assert resumed.step == 2 * EVERY
    assert torch.equal(expected, again.train(others, start=resumed.step, steps=11))


def test_the_state_of_every_optimizer_is_its_own(tmp_path: Path) -> None:
    gan, run = Gan.new(), make_run(tmp_path)
    critic, maker = wrapped(run, gan)
    gan.train([critic, maker], steps=2)
    assert "atoll" not in critic.state_dict()
    assert maker.state_dict()["atoll"]["step"] == 2
    assert {"exp_avg"} < set(critic.state_dict()["state"][0])
    schedule = torch.optim.lr_scheduler.LambdaLR(critic, lambda _: 0.5**run.step)
    assert schedule.get_last_lr() == [0.02 * 0.25]
    assert "one of several" in repr(critic)


def test_one_optimizer_may_be_given_in_a_list(tmp_path: Path) -> None:
    model = small_model()
    (optimizer,) = make_run(tmp_path).wrap([model], [adamw(model)], outer="ddp")
    assert optimizer.inner.param_groups is optimizer.param_groups


@pytest.mark.parametrize("outer", ["ddp", "signsgd", "one-peer-exponential", "eager-diloco"])
def test_methods_that_act_in_every_step_are_refused(tmp_path: Path, outer: str) -> None:
    with pytest.raises(ConfigError, match="every step of one optimizer") as caught:
        wrapped(make_run(tmp_path), Gan.new(), outer=outer)
    assert "local-sgd" in str(caught.value)


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    run, model = make_run(tmp_path), small_model()
    with pytest.raises(ConfigError, match="no model"):
        run.wrap([], [adamw(model)])
    with pytest.raises(ConfigError, match="no optimizer"):
        run.wrap(model, [])


def test_the_states_of_other_optimizers_are_refused(tmp_path: Path) -> None:
    gan, run = Gan.new(), make_run(tmp_path)
    wrapped(run, gan)
    assert run._task is not None
    with pytest.raises(ValueError, match="1 optimizers were saved, given 2"):
        run._task.optimizer.load_state_dict({"optimizers": [{}]})


def test_several_optimizers_of_an_island_are_refused() -> None:
    agreement = Agreement.of("diloco", steps=0, codec="", aggregation=Aggregation())
    with pytest.raises(ConfigError, match="an island trains with one optimizer"):
        agreement.check(again=False, nodes=2, spread=True, optimizers=2)
