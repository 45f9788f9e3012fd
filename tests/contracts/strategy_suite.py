"""What every outer strategy has to prove; subclass :class:`StrategySuite` in a test file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from atoll.codec import make_codec
from atoll.errors import AtollError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.strategies.base import Outer, SyncResult
from atoll.strategies.inner.local import Local
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from tests.patience import PATIENCE_S

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BATCH = 4
Batch = tuple[Tensor, Tensor]


def small_model(*, seed: int = 3, normalised: bool = False) -> nn.Module:
    """Return a network of 26 numbers; BatchNorm adds 6, and 6 of buffers."""
    middle: list[nn.Module] = [nn.BatchNorm1d(3)] if normalised else []
    model = nn.Sequential(nn.Linear(5, 3), *middle, nn.Tanh(), nn.Linear(3, 2))
    # Not torch's own generator: members run in threads and would share it.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def batches(slot: int, *, start: int = 0, size: int = BATCH) -> Iterator[Batch]:
    """Yield an endless, reproducible stream of a slot's batches, each slot from its own region."""
    step = start
    while True:
        generator = torch.Generator().manual_seed(1_000 * slot + step)
        x = torch.randn(size, 5, generator=generator) + 0.3 * slot
        yield x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], dim=1)
        step += 1


def squared_error(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the mean squared error and the number of samples."""
    return nn.functional.mse_loss(model(batch[0]), batch[1]), len(batch[0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass
class Run:
    """One member's training."""

    task: Task
    outer: Outer
    stream: Iterator[Batch]
    inner: Local
    rounds: list[Tensor] = field(default_factory=list)
    results: list[SyncResult] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def vector(self) -> Tensor:
        return Flat([*self.task.parameters(), *self.task.buffers()]).read()

    def note(self, result: SyncResult | None) -> None:
        if result is not None:
            self.results.append(result)
            self.rounds.append(self.vector())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            done = self.inner.step(self.task, next(self.stream), self.outer)
            self.losses.append(done.loss)
            self.note(done.sync)

    def train_noting(self, steps: int) -> list[int]:
        """Train; return the steps after which a round's result was applied."""
        found, before = [], len(self.results)
        for _ in range(steps):
            self.train(1)
            if len(self.results) > before:
                found.append(self.task.step)
                before = len(self.results)
        return found


def start_run(
    options: Any,
    group: Group,
    slot: int,
    *,
    codec: str = "fp32",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    model: nn.Module | None = None,
    size: int = BATCH,
    begin: bool = True,
    clip: float = 1.0,
) -> Run:
    """Return a member that is set up and has agreed on the start."""
    model = small_model() if model is None else copy.deepcopy(model)
    task = Task(model, optimizer(model), member=group.me)
    outer: Outer = options.build()
    outer.setup(task, group=group, codec=make_codec(codec))
    if begin:
        outer.begin(task)
    return Run(task, outer, batches(slot, size=size), Local(squared_error, clip=clip))


def train_together(
    options: Any, *, members: int, steps: int, slots: Sequence[int] | None = None, **settings: Any
) -> list[Run]:
    """Train in threads of one process and return every member's run, finished.

    `slots` names the data that each member trains on, in slot order; each its own if left out.
    """
    groups = MemoryGroups(members)

    def body(group: Group) -> Run:
        slot = int(group.me[1:])
        run = start_run(options, group, slot if slots is None else slots[slot], **settings)
        run.train(steps)
        run.note(run.outer.finish(run.task))
        return run

    return groups.together(body)


def plain_training(
    steps: int,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    model: nn.Module | None = None,
) -> Tensor:
    """Return the parameters after a bare torch loop on slot 0's batches."""
    model = small_model() if model is None else copy.deepcopy(model)
    chosen, stream = optimizer(model), batches(0)
    for _ in range(steps):
        chosen.zero_grad()
        loss, _ = squared_error(model, next(stream))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
    return Flat([*model.parameters()]).read()


@dataclass
class Reference:
    """A formula's members: plain torch objects in double precision where it matters."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    streams: list[Iterator[Batch]]

    @classmethod
    def make(
        cls, members: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> Reference:
        models = [small_model() for _ in range(members)]
        return cls(models, [optimizer(m) for m in models], [batches(s) for s in range(members)])

    def gradient_step(self, member: int) -> None:
        model, optimizer = self.models[member], self.optimizers[member]
        optimizer.zero_grad()
        squared_error(model, next(self.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def vectors(self) -> list[Tensor]:
        return [Flat([*model.parameters()]).read().double() for model in self.models]

    def assign(self, vector: Tensor) -> None:
        for model in self.models:
            Flat([*model.parameters()]).write(vector.float())


class StrategySuite:
    """The promises of every outer strategy. Subclasses say which one and give its formula."""

    name: ClassVar[str]
    """Of the golden file."""
    options: ClassVar[Any]
    steps: ClassVar[int] = 10
    codec: ClassVar[str] = "fp32"
    tolerance: ClassVar[float] = 2e-6
    exchanges: ClassVar[bool] = True
    """Whether members influence each other at all."""
    identical: ClassVar[bool] = True
    """Whether members carry the same parameters after every round; if not, they carry the same
    ones at the end."""
    coarse: ClassVar[str] = "feedback(int8)"
    """A codec with state of its own, for what has to survive saving."""
    wires: ClassVar[tuple[str, ...]] = ("fp32", "int8")
    """Codecs for which bytes are counted."""
    start_bytes: ClassVar[int] = 128
    """What it weighs to find that all start from the same parameters."""

    def reference(self, members: int, steps: int) -> Tensor:
        """Return the parameters after so many steps, in double precision, by the formula."""
        raise NotImplementedError  # abstract: each strategy has its own formula

    def same_as_plain(self) -> Any:
        """Return options with which one member trains exactly like plain torch."""
        return self.options

    def test_one_member_equals_plain_training_bit_for_bit(self) -> None:
        for group in (SingleGroup(), MemoryGroups(1)[0]):
            run = start_run(self.same_as_plain(), group, 0)
            run.train(self.steps)
            run.outer.finish(run.task)
            assert torch.equal(run.vector(), plain_training(self.steps))

    @pytest.mark.every(2)
    @pytest.mark.parametrize("members", [3, 2])
    def test_members_follow_the_formula(self, members: int) -> None:
        runs = train_together(self.options, members=members, steps=self.steps)
        expected = self.reference(members, self.steps)
        assert (runs[0].vector().double() - expected).abs().max() < self.tolerance

    def test_members_are_identical_after_every_round(self) -> None:
        runs = train_together(self.options, members=3, steps=self.steps, codec=self.codec)
        assert runs[0].rounds or not self.exchanges
        for mine, first in zip(runs[1:], [runs[0], runs[0]], strict=True):
            if not self.exchanges:
                continue
            assert [r.digest for r in mine.results] == [r.digest for r in first.results]
            assert torch.equal(mine.vector(), first.vector())
            for a, b in zip(mine.rounds, first.rounds, strict=True):
                assert torch.equal(a, b) or not self.identical

    def test_two_runs_are_equal_bit_for_bit(self) -> None:
        first, second = (
            train_together(self.options, members=2, steps=self.steps, codec=self.coarse)
            for _ in range(2)
        )
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.vector(), b.vector())
            assert a.losses == b.losses

    @pytest.mark.every(3)
    @pytest.mark.parametrize("cut", [3, 4, 5])
    def test_saved_and_loaded_in_mid_run_equals_uninterrupted(self, cut: int) -> None:
        codec = self.coarse
        whole = train_together(self.options, members=2, steps=self.steps, codec=codec)

        def interrupted(group: Group) -> Run:
            run = start_run(self.options, group, int(group.me[1:]), codec=codec)
            run.train(cut)
            model = copy.deepcopy(run.task.model)
            optimizer_state = copy.deepcopy(run.task.optimizer.state_dict())
            outer_state = {k: v.clone() for k, v in run.outer.state_dict().items()}
            done = run.task
            run = start_run(self.options, group, 0, codec=codec, model=model, begin=False)
            run.task.optimizer.load_state_dict(optimizer_state)
            run.task.step, run.task.tokens, run.task.round = done.step, done.tokens, done.round
            run.outer.load_state_dict(outer_state)
            run.stream = batches(int(group.me[1:]), start=cut)
            run.train(self.steps - cut)
            run.outer.finish(run.task)
            return run

        halves = MemoryGroups(2).together(interrupted)
        for a, b in zip(whole, halves, strict=True):
            assert torch.equal(a.vector(), b.vector())

    @pytest.mark.every(3)
    @pytest.mark.parametrize("phase", ["join", "send", "sent", "commit"])
    def test_a_member_lost_in_any_phase_leaves_the_others_identical(self, phase: str) -> None:
        groups = MemoryGroups(3, timeout_s=PATIENCE_S)

        def body(group: Group) -> Run:
            run = start_run(self.options, group, int(group.me[1:]))
            if group.me == "w1":
                groups.kill("w1", at=phase)
            run.train(self.steps)
            run.outer.finish(run.task)
            return run

        results = groups.run(body)
        lost = results[1]
        assert isinstance(lost, AtollError)
        survivors = [run for run in (results[0], results[2]) if isinstance(run, Run)]
        assert len(survivors) == 2
        if self.exchanges:
            assert torch.equal(survivors[0].vector(), survivors[1].vector())
        assert survivors[0].task.round == survivors[1].task.round
        assert {run.task.step for run in survivors} == {self.steps}

    def test_bytes_sent_equal_the_formula(self) -> None:
        for codec in self.wires:
            runs = train_together(self.options, members=2, steps=self.steps, codec=codec)
            expected = runs[0].outer.traffic(26, 2, steps=self.steps)
            run = runs[0]
            start = self.start_bytes if self.exchanges else 0
            assert sum(r.sent_bytes for r in run.results) + start == expected.relay_sent_bytes
            assert (
                sum(r.received_bytes for r in run.results) + start == expected.relay_received_bytes
            )
            assert run.task.round == expected.rounds

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        straight = train_together(self.options, members=3, steps=self.steps)
        permuted = train_together(self.options, members=3, steps=self.steps, slots=(2, 0, 1))
        assert (straight[0].vector() - permuted[1].vector()).abs().max() < self.tolerance

    def test_buffers_are_equal_on_all_members(self) -> None:
        runs = train_together(
            self.options, members=2, steps=self.steps, model=small_model(normalised=True)
        )
        if self.exchanges:
            first, second = (run.task.buffers() for run in runs)
            assert len(first) == 2
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_members_start_from_the_first_ones_parameters(self) -> None:
        if not self.exchanges:
            pytest.skip("members never meet")
        groups = MemoryGroups(3)
        models = {f"w{slot}": small_model(seed=slot) for slot in range(3)}
        runs = groups.together(lambda g: start_run(self.options, g, 0, model=models[g.me]))
        expected = Flat(list(models["w0"].parameters())).read()
        assert all(torch.equal(run.vector(), expected) for run in runs)

    def test_golden_trajectory(self, request: pytest.FixtureRequest) -> None:
        runs = train_together(self.options, members=3, steps=self.steps, codec=self.codec)
        norms = [round(float(vector.norm()), 4) for vector in runs[0].rounds]
        losses = [round(loss, 4) for loss in runs[0].losses]
        found = {"losses": losses, "norms_after_rounds": norms}
        path = GOLDEN / f"{self.name}.json"
        if request.config.getoption("--regenerate", default=False):
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        golden = json.loads(path.read_text(encoding="utf-8"))
        assert found["losses"] == pytest.approx(golden["losses"], abs=2e-4)
        assert found["norms_after_rounds"] == pytest.approx(golden["norms_after_rounds"], abs=2e-4)
