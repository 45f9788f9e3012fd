"""The outer strategy's memory is counted as it turns out to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.codec import make_codec
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.plan.leader import leader_memory
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.resolve import resolve
from atoll.strategies.vectors.flat import iter_tensors
from atoll.task import Task
from atoll.train.build import whole_model
from atoll.train.optim.optimizers import build_optimizer
from tests.plan.jobs import job

STEPS = 8
SIZES = "layers = 1\nwidth = 32\nheads = 2\ncontext = 8"
EVERY = "\nevery = 2\nouter_lr = 0.1\nshared_steps = 0"

STRATEGIES = {
    "alone": 'preset = "alone"',
    "average": 'outer = "average"\ncodec = "fp32"\nevery = 2',
    "nesterov": 'outer = "diloco"\ncodec = "fp32"' + EVERY,
    "sgd": 'outer = "diloco"\ncodec = "int8"\nouter_optimizer = "sgd"' + EVERY,
    "adam": 'outer = "diloco"\ncodec = "fp32"\nouter_optimizer = "adam"' + EVERY,
    "feedback": 'outer = "diloco"\ncodec = "feedback(int8)"' + EVERY,
    "ef21": 'outer = "diloco"\ncodec = "ef21(int8)"' + EVERY,
    "streaming": 'outer = "streaming"\ncodec = "fp32"\nevery = 4\nfragments = 2\ndelay = 0',
    "eager": 'outer = "eager"\ncodec = "fp32"\nevery = 2\nouter_lr = 0.1',
    "slowmo": 'outer = "slowmo"\ncodec = "fp32"\nevery = 2',
    "gossip": 'outer = "gossip"\ncodec = "fp32"',
    "noloco": 'outer = "noloco"\ncodec = "fp32"\nevery = 2',
    "sparta": 'outer = "sparta"\ncodec = "fp32"',
    "sparta_outer": 'outer = "sparta"\ncodec = "fp32"\nevery = 2',
    "signs": 'outer = "sign_majority"\ncodec = "sign"',
    "powersgd": 'outer = "powersgd"\ncodec = "fp32"',
    "demo": 'outer = "demo"\ncodec = "bf16"',
    "onebit": 'outer = "onebit_adam"\ncodec = "sign"\nwarmup_steps = 2',
    "every_step": 'preset = "ddp"',
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_outer_state_is_what_members_keep_after_rounds(tmp_path: Path, name: str) -> None:
    spec = job(tmp_path, strategy=STRATEGIES[name], sizes=SIZES, train="steps = 100")
    resolved = resolve(spec.strategy, steps=spec.train.steps)

    def member(group: Group) -> tuple[int, int]:
        model: Any = whole_model(spec)
        own = {_key(t) for t in (*model.parameters(), *model.buffers())}
        task = Task(model, build_optimizer(model, spec.train), member=group.me, last=100)
        outer, codec = resolved.build(), make_codec(resolved.codec)
        outer.setup(task, group=group, codec=codec)
        outer.begin(task)
        inner = Local(language_model_loss, clip=1.0)
        ids = torch.arange(16).view(2, 8) + int(group.me[1:])
        for _ in range(STEPS):
            inner.step(task, (ids, ids + 1), outer)
        kept = {_key(t): t for t in iter_tensors([outer, codec])}
        nbytes = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
        return nbytes, _whole(model)

    (measured, model_bytes), _ = MemoryGroups(2).together(member)
    found = leader_memory(spec, resolved)
    assert found.outer == pytest.approx(measured, rel=0.05, abs=0.02 * model_bytes)
    assert (found.exchange > 0) == (name != "alone")


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_diloco_keeps_three_vectors_error_feedback_three_more(tmp_path: Path) -> None:
    found = {}
    for codec in ("fp32", "feedback(int8)"):
        spec = job(tmp_path, strategy=f'outer = "diloco"\ncodec = "{codec}"')
        resolved = resolve(spec.strategy, steps=spec.train.steps)
        found[codec] = leader_memory(spec, resolved)
    model = sum(p.nbytes for p in whole_model(spec).parameters())
    assert found["fp32"].outer == pytest.approx(3 * model, rel=0.01)
    assert found["feedback(int8)"].outer == pytest.approx(6 * model, rel=0.01)
