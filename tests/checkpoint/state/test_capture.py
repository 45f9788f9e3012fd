"""Save, lose everything, resume: training goes on bit for bit (property U4 of every method)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.checkpoint import (
    SHARED,
    DirectoryStore,
    Extras,
    OuterState,
    Restored,
    SavePoint,
    Store,
    collect,
    describe,
    resume,
)
from atoll.checkpoint.state.capture import random_state, set_random_state
from atoll.checkpoint.state.outer_state import CODEC_STATE
from atoll.codec import Codec, make_codec
from atoll.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from atoll.task import Task
from atoll.train.optim.muon import muon

ABOUT = describe("net", options={}, tokenizer="")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "muon": lambda model: muon(model, lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


class Net(nn.Module):
    """Dropout draws random numbers, BatchNorm keeps buffers, two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.norm(self.one(x))))  # type: ignore[no-any-return]


class Training:
    """Three random generators, a schedule, a codec with residuals, an outer momentum."""

    def __init__(self, *, seed: int, member: str = "w0", optimizer: str = "adamw") -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        model = Net()
        inner = OPTIMIZERS[optimizer](model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
        self.task = Task(model, inner, scheduler, member=member)
        self.codec: Codec = make_codec("feedback(int8)")
        self.outer: dict[str, Tensor] = {"shared.momentum": torch.zeros(6), "own": torch.zeros(1)}
        self.cursor = {"slot": 0, "offset": 0}

    def round(self, *, steps: int = 3) -> None:
        task = self.task
        for _ in range(steps):
            x = torch.randn(4, 6) + float(np.random.normal()) + random.random()
            task.optimizer.zero_grad()
            task.model(x).square().mean().backward()
            task.optimizer.step()
            assert task.scheduler is not None
            task.scheduler.step()
            task.step += 1
            task.tokens += 24
            self.cursor["offset"] += 4
        packet = self.codec.encode(task.parameters()[1].detach().clone(), key="delta")
        self.codec.finish(committed=True)
        self.outer["shared.momentum"].mul_(0.9).add_(self.codec.decode(packet))
        self.outer["own"] += 1
        task.round += 1

    def save(
        self, store: Store, *, members: tuple[str, ...] = ("w0",), own_model: bool = False
    ) -> bool:
        codec = {CODEC_STATE + name: tensor for name, tensor in self.codec.state_dict().items()}
        own, common = collect(
            self.task,
            OuterState({**self.outer, **codec}, own_model=own_model),
            Extras(
                cursor=self.cursor, counters={"wall_s": 1.5, "rounds": 3, "why": "test"},
                about=ABOUT,
            ),
        )  # fmt: skip
        point = SavePoint(self.task.round, self.task.step, self.task.member, members)
        return store.put(point, [own, common] if point.shared else [own])

    def resume(self, store: Store, round_: int) -> Restored:
        restored = resume(store, round_, self.task)
        codec = {k: v for k, v in restored.outer.items() if k.startswith(CODEC_STATE)}
        self.outer.update({k: v for k, v in restored.outer.items() if k not in codec})
        self.codec.load_state_dict({k.removeprefix(CODEC_STATE): v for k, v in codec.items()})
        self.cursor = restored.cursor or self.cursor
        return restored

    def everything(self) -> list[Any]:
        """Return all state as comparable bytes."""
        state = self.task.optimizer.state_dict()["state"]
        tensors = [
            *self.task.model.state_dict().values(),
            *(t for slot in state.values() for t in slot.values() if isinstance(t, Tensor)),
            *self.outer.values(),
            *self.codec.state_dict().values(),
            torch.get_rng_state(),
        ]
        assert self.task.scheduler is not None
        return [
            [t.numpy().tobytes() for t in tensors],
            self.task.scheduler.state_dict()["last_epoch"],
            [group["lr"] for group in self.task.optimizer.param_groups],
            (self.task.step, self.task.tokens, self.task.round),
            dict(self.cursor),
            str(np.random.get_state()),
            random.getstate(),
        ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_training_equals_training_that_never_stopped(
    tmp_path: Path, optimizer: str
) -> None:
    store = DirectoryStore(tmp_path)
    training = Training(seed=1, optimizer=optimizer)
    training.round()
    training.round()
    assert training.save(store)
    saved = training.everything()
    training.round()
    uninterrupted = training.everything()

    other = Training(seed=2, optimizer=optimizer)
    restored = other.resume(store, 2)
    assert other.everything() == saved
    assert restored.counters == {"wall_s": 1.5, "rounds": 3, "why": "test"}
    assert not restored.borrowed
    other.round()
    assert other.everything() == uninterrupted


def test_saving_changes_nothing(tmp_path: Path) -> None:
    training = Training(seed=1)
    training.round()
    before = training.everything()
    training.save(DirectoryStore(tmp_path))
    assert training.everything() == before


def test_every_member_gets_its_own_part_back(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    saved = {}
    for member in ("w0", "w1"):
        training = Training(seed=1, member=member)
        training.round()
        random.seed(member)
        training.cursor = {"slot": int(member[1:]), "offset": 40}
        training.save(store, members=("w0", "w1"))
        saved[member] = training.everything()
    for member in ("w1", "w0"):
        other = Training(seed=9, member=member)
        other.resume(store, 1)
        assert other.everything() == saved[member]


def test_members_that_stand_on_different_models_keep_them(tmp_path: Path) -> None:
    store, saved = DirectoryStore(tmp_path), {}
    for slot, member in enumerate(("w0", "w1")):
        training = Training(seed=slot, member=member)
        training.round()
        training.save(store, members=("w0", "w1"), own_model=True)
        saved[member] = training.everything()
    assert saved["w0"] != saved["w1"]
    for member in ("w1", "w0"):
        other = Training(seed=9, member=member)
        other.resume(store, 1)
        assert other.everything() == saved[member]
    newcomer = Training(seed=9, member="w2")
    assert newcomer.resume(store, 1).borrowed
    assert newcomer.everything()[0][0] == saved["w0"][0][0]


def test_newcomer_takes_no_members_data_position_or_rng(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    donor = Training(seed=1)
    donor.round()
    donor.save(store)
    newcomer = Training(seed=2, member="w7")
    before = str(random_state())
    restored = newcomer.resume(store, 1)
    assert str(random_state()) == before
    assert restored.borrowed
    assert (restored.cursor, restored.counters) == (None, {})
    assert list(restored.outer) == ["shared.momentum"]
    theirs = donor.task.model.state_dict()
    assert all(torch.equal(v, theirs[k]) for k, v in newcomer.task.model.state_dict().items())
    assert (newcomer.task.step, newcomer.task.round, newcomer.task.tokens) == (3, 1, 0)
    state = newcomer.task.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(state, donor.task.optimizer.state_dict()["state"][0]["exp_avg"])
    lr = donor.task.optimizer.param_groups[0]["lr"]
    assert newcomer.task.optimizer.param_groups[0]["lr"] == lr


def test_random_state_comes_back() -> None:
    before = random_state()
    drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())
    set_random_state(before)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == drawn


def test_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    training = Training(seed=1)
    training.save(store)
    other = Training(seed=1)
    other.task.model = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match=r"of another model; given: .*one\.weight"):
        other.resume(store, 0)


def test_another_optimizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    training = Training(seed=1)
    training.save(store)
    other = Training(seed=1)
    model = other.task.model
    other.task.optimizer = torch.optim.SGD(
        [{"params": [model.one.weight]}, {"params": [model.one.bias]}]  # type: ignore[union-attr]
    )
    with pytest.raises(CheckpointError, match="of another optimizer"):
        other.resume(store, 0)


def test_state_that_cannot_be_saved_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    training = Training(seed=1)
    training.save(store)
    training.round()
    training.outer["own"] = object()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="own/outer/own cannot be saved"):
        training.save(store)
    assert store.latest() == 0


def test_parts_of_two_checkpoints_do_not_go_together(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    training = Training(seed=1)
    training.save(store)
    training.round()
    training.save(store)
    parts = [store.get(round_, names={SHARED, "w0.safetensors"}) for round_ in (0, 1)]

    class Mixed(DirectoryStore):
        def get(self, round_: int, *, names: object) -> Any:
            return {SHARED: parts[0][SHARED], "w0.safetensors": parts[1]["w0.safetensors"]}

    with pytest.raises(CheckpointCorrupt, match="not of one checkpoint"):
        resume(Mixed(tmp_path), 1, training.task)


def test_nothing_saved_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="no complete checkpoint of round 3"):
        resume(DirectoryStore(tmp_path), 3, Training(seed=1).task)
