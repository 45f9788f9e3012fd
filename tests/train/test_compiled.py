"""Members that compile: their model, its forward in place, the loss, or the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from tests.contracts.strategy_suite import BATCH, adamw, batches, small_model, squared_error
from tests.loops import plain_loops
from tests.loops.job import Job, Life
from tests.patience import PATIENCE_S
from tests.train.test_wrapped import make_run, vector

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it traces
DILOCO = atoll.DiLoCo(every=3, outer_lr=0.5, outer_momentum=0.5)
BOTH, ONE = ("w0", "w1"), ("w0",)


class Compiled(StrEnum):
    NOTHING = "nothing"
    MODEL = "model"
    IN_PLACE = "in-place"
    LOSS = "loss"
    STEP = "step"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test begins without the graphs of others, whose number is limited."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train_two(
    outer: Any, folder: Path, what: Compiled, *, who: Sequence[str] = BOTH
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train two members; return their parameters, which are equal, and the saved weights."""
    taking_turns = threading.Lock()

    def body(group: Group) -> tuple[Tensor, Path | None]:
        mine = what if group.me in who else Compiled.NOTHING
        with make_run(folder / group.me, group) as run:
            model: Any = small_model(seed=run.slot)
            plain: nn.Module = model
            if mine == Compiled.MODEL:
                model = torch.compile(model, backend="aot_eager")
            elif mine == Compiled.IN_PLACE:
                model.compile(backend="aot_eager")
            optimizer = run.wrap(model, adamw(model), outer=outer)
            loss: Callable[..., Any] = squared_error
            step: Callable[[], Any] = optimizer.step
            if mine == Compiled.LOSS:
                loss = torch.compile(loss, backend="aot_eager")
            elif mine == Compiled.STEP:
                step = torch.compile(step, backend="aot_eager")
            stream = batches(run.slot)
            for _ in range(7):
                optimizer.zero_grad()
                with taking_turns:  # a process has one compiler
                    loss(model, next(stream))[0].backward()
                run.log(tokens=BATCH)
                step()
            saved = run.save(model)
        return vector(plain), saved

    # One waits while the other compiles, which takes long on a busy machine.
    (first, saved), (second, _) = MemoryGroups(2, timeout_s=PATIENCE_S).together(
        body, timeout_s=2 * PATIENCE_S
    )
    assert torch.equal(first, second)
    assert saved is not None
    return first, load_file(saved)


@pytest.mark.parametrize(
    ("what", "outer", "who"),
    [
        (Compiled.MODEL, DILOCO, BOTH),
        (Compiled.MODEL, "ddp", BOTH),
        (Compiled.MODEL, DILOCO, ONE),
        (Compiled.IN_PLACE, "ddp", BOTH),
        (Compiled.LOSS, DILOCO, BOTH),
        (Compiled.LOSS, "ddp", ONE),
        (Compiled.STEP, DILOCO, BOTH),
    ],
)
@pytest.mark.every(3)
def test_two_members_end_as_without_compiling(
    tmp_path: Path, what: Compiled, outer: Any, who: Sequence[str]
) -> None:
    expected, weights = train_two(outer, tmp_path / "plain", Compiled.NOTHING)
    found, saved = train_two(outer, tmp_path / "compiled", what, who=who)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert saved.keys() == weights.keys() == small_model().state_dict().keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("first_compiled", [True, False])
def test_a_job_resumes_whether_it_compiles_or_not(tmp_path: Path, first_compiled: bool) -> None:
    method = atoll.DiLoCo(every=2, outer_lr=0.7, outer_momentum=0.5)
    whole = Job(tmp_path / "whole", 2, method=method, every=1).train(plain_loops.uncompiled)
    loops = [plain_loops.compiled, plain_loops.uncompiled]
    first, then = loops if first_compiled else reversed(loops)
    job = Job(tmp_path / "parted", 2, method=method, every=1)
    job.train(first, kill_after=5)
    again = Job(job.folder, 2, method=method, every=1, resume=job.store.latest())
    lives: list[Life] = again.train(then)
    assert [life.first for life in lives] == [4, 4]
    assert lives[0].state == lives[1].state
    found, expected = (life.ended.model for life in (lives[0], whole[0]) if life.ended is not None)
    torch.testing.assert_close(vector(found), vector(expected), rtol=0, atol=1e-6)


class Twice(nn.Module):
    """One of its layers is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.compile(nn.Linear(3, 2), backend="eager")


def test_saved_names_are_those_of_the_model(tmp_path: Path) -> None:
    run, model = make_run(tmp_path), Twice()
    run.wrap(model, adamw(model), outer=DILOCO)
    saved = run.save(model)
    assert saved is not None
    assert set(load_file(saved)) == {"layer.weight", "layer.bias"}
