"""transformers.Trainer with a wrapped optimizer and the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll as package
from atoll.errors import LeftBehind
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.e2e.conftest import Atoll
from tests.integrations.examples import assert_same, load, run_on_two_nodes, take_over

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
STEPS = 24


def make_run(group: Group, folder: Path, *, num_slots: int = 2) -> Run:
    return Run(group, Membership(folder, slot=int(group.me[1:]), num_slots=num_slots))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def example() -> Any:
    return load("transformers_trainer")


@pytest.mark.e2e
@pytest.mark.long("tests/loops/test_loops.py::test_together_members_end_with_one_model")
def test_two_processes_end_as_the_native_loop(atoll: Atoll, tmp_path: Path, example: Any) -> None:
    groups = MemoryGroups(2)
    runs = [make_run(group, tmp_path) for group in groups]
    arguments = example.settings(tmp_path, steps=STEPS)
    loaders = [
        transformers.Trainer(
            example.make_model(),
            arguments,
            train_dataset=run.shard(example.Windows(64, 2000)),
            eval_dataset=example.Windows(0, 8),
        ).get_train_dataloader()
        for run in runs
    ]
    models = [example.make_model() for _ in runs]

    def native(group: Group) -> None:
        slot = int(group.me[1:])
        with runs[slot] as run:
            model, stream = models[slot], iter(loaders[slot])
            inner = torch.optim.AdamW(model.parameters(), 3e-3)
            outer = package.DiLoCo(every=20, outer_lr=0.8, outer_momentum=0.5)
            optimizer = run.wrap(model, inner, outer=outer)
            schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 5, STEPS)
            for _ in range(STEPS):
                pair = [next(stream) for _ in range(2)]
                items = sum(batch["labels"].numel() for batch in pair)
                for batch in pair:
                    model(**batch, num_items_in_batch=items).loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                run.log(tokens=items)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    groups.together(native)
    assert torch.equal(vector(models[0]), vector(models[1]))
    found = run_on_two_nodes(atoll, "transformers_trainer", steps=STEPS)
    assert_same(found, models[0], tolerance=1e-5)


def train_alone(
    example: Any, folder: Path, *, callback: bool = True, resume: Path | None = None, **changes: Any
) -> Any:
    """Train one member whose agreed parameters differ from its own; return its Trainer."""
    from atoll.integrations.transformers import AtollCallback

    run = make_run(SingleGroup(), folder, num_slots=1)
    model = example.make_model()
    optimizer = run.wrap(
        model,
        torch.optim.AdamW(model.parameters(), 3e-3),
        outer=package.DiLoCo(every=4, outer_lr=0.5, outer_momentum=0.0),
    )
    arguments = example.settings(folder, steps=changes.pop("steps", 10))
    for name, value in changes.items():
        setattr(arguments, name, value)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=example.Windows(64, 400),
        eval_dataset=example.Windows(0, 32),
        optimizers=(optimizer, None),
        callbacks=[AtollCallback(run)] if callback else [],
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    return trainer


def evaluations(trainer: Any) -> dict[int, float]:
    return {
        int(line["step"]): float(line["eval_loss"])
        for line in trainer.state.log_history
        if "eval_loss" in line
    }


def test_it_evaluates_the_agreed_parameters(tmp_path: Path, example: Any) -> None:
    found = evaluations(train_alone(example, tmp_path, eval_steps=1))
    # Between two rounds the agreed parameters rest, so their loss does; the own ones learn.
    assert found[1] == found[2] == found[3]
    assert found[3] != found[4]
    assert found[4] == found[5] == found[6] == found[7]
    assert found[10] != found[9]  # the last steps were agreed on before the last evaluation
    own = evaluations(train_alone(example, tmp_path, eval_steps=1, callback=False))
    assert len({own[step] for step in (1, 2, 3)}) == 3


def test_it_saves_the_agreed_parameters(tmp_path: Path, example: Any) -> None:
    quiet = train_alone(example, tmp_path / "quiet", eval_strategy="no")
    trainer = train_alone(
        example, tmp_path, eval_strategy="no", save_strategy="steps", save_steps=3
    )
    assert torch.equal(vector(quiet.model), vector(trainer.model))
    kept = type(trainer.model).from_pretrained(tmp_path / "trainer" / "checkpoint-3")
    assert torch.equal(vector(kept), vector(example.make_model()))  # no round before step 4


def test_a_trainers_checkpoint_after_a_round_goes_on_bit_for_bit(
    tmp_path: Path, example: Any
) -> None:
    saving = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 4}
    whole = train_alone(example, tmp_path, **saving)  # type: ignore[arg-type]
    kept = tmp_path / "trainer" / "checkpoint-4"
    again = train_alone(example, tmp_path / "again", resume=kept, eval_strategy="no")
    assert again.state.global_step == 10
    assert torch.equal(vector(whole.model), vector(again.model))


def test_the_best_model_is_loaded_after_the_last_round(tmp_path: Path, example: Any) -> None:
    trainer = train_alone(
        example, tmp_path, eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert torch.equal(vector(best), vector(trainer.model))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_it_stops_when_the_job_does(tmp_path: Path, example: Any) -> None:
    from atoll.integrations.transformers import AtollCallback

    group = MemoryGroups(1)[0]
    run = make_run(group, tmp_path, num_slots=1)
    model = example.make_model()
    optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), 0.1), outer="local-sgd")

    class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            group.stopping = state.global_step == 2

    trainer = transformers.Trainer(
        model, example.settings(tmp_path, steps=50), train_dataset=example.Windows(64, 400),
        eval_dataset=example.Windows(0, 8), optimizers=(optimizer, None),
        callbacks=[Stop(), AtollCallback(run)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3


class Diary(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Notes the learning rate of every step, the batches, and what was logged."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.batches: list[Tensor] = []
        self.losses: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.rates[state.global_step] = more["optimizer"].param_groups[0]["lr"]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.losses |= {state.global_step: logs["loss"]} if "loss" in logs else {}

    def note(self, module: nn.Module, args: Any, inputs: Any) -> None:
        if module.training:
            self.batches.append(inputs["input_ids"].clone())


def rejoin(
    example: Any, folder: Path, *, steps: int, donor: Run | None = None, again_at: int = 0
) -> tuple[Run, Diary, Any]:
    """Train a member; it takes over a donor's state at once, and again in a later step."""
    from atoll.integrations.transformers import AtollCallback

    run, model, diary = make_run(SingleGroup(), folder, num_slots=1), example.make_model(), Diary()
    model.register_forward_pre_hook(diary.note, with_kwargs=True)
    inner = torch.optim.AdamW(model.parameters(), 3e-3)
    optimizer: Any = run.wrap(model, inner, outer=package.DiLoCo(every=3, outer_lr=0.5))
    if donor is not None and not again_at:
        take_over(run, donor)
    elif donor is not None:
        sync = optimizer.outer.sync

        def left_behind(task: Any) -> Any:
            if task.step == again_at:
                raise LeftBehind("the group went on")
            return sync(task)

        optimizer.outer.sync = left_behind
        optimizer._recover = lambda error: take_over(run, donor)
    arguments = example.settings(folder, steps=steps)
    arguments.eval_strategy, arguments.logging_steps = "no", 2
    trainer = transformers.Trainer(
        model, arguments, train_dataset=example.Windows(64, 264), optimizers=(optimizer, None),
        callbacks=[AtollCallback(run), diary],
    )  # fmt: skip
    trainer.train()
    return run, diary, trainer


def test_a_member_that_joins_late_goes_on_at_the_groups_step(tmp_path: Path, example: Any) -> None:
    # A pass has 200 windows: 25 batches, so 13 steps of two.
    _, expected, _ = rejoin(example, tmp_path / "whole", steps=24)
    for stop in (9, 15):
        donor, _, _ = rejoin(example, tmp_path / f"donor{stop}", steps=stop)
        run, diary, trainer = rejoin(example, tmp_path / f"late{stop}", steps=24, donor=donor)
        assert trainer.state.global_step == run.step == 24
        assert list(diary.rates) == list(range(stop, 24))
        assert diary.rates == {step: expected.rates[step] for step in diary.rates}
        if stop < 13:  # still in the first pass: the batches are those that come next
            rest = expected.batches[2 * stop : 25]
            assert all(map(torch.equal, diary.batches[: len(rest)], rest))
        assert min(diary.losses.values()) > 1.0  # not divided by the group's steps
        assert trainer.state.log_history[-1]["train_loss"] > 1.0


def test_a_member_that_recovers_goes_on_at_the_groups_step(tmp_path: Path, example: Any) -> None:
    _, expected, _ = rejoin(example, tmp_path / "whole", steps=12)
    donor, _, _ = rejoin(example, tmp_path / "donor", steps=9)
    run, diary, trainer = rejoin(example, tmp_path, steps=12, donor=donor, again_at=5)
    assert list(diary.rates) == [0, 1, 2, 3, 4, 9, 10, 11]
    assert trainer.state.global_step == run.step == 12
    assert {step: expected.rates[step] for step in diary.rates} == diary.rates
    assert min(diary.losses.values()) > 1.0


def test_a_member_that_joins_after_the_last_step_trains_none(tmp_path: Path, example: Any) -> None:
    donor, _, _ = rejoin(example, tmp_path / "donor", steps=6)
    run, diary, trainer = rejoin(example, tmp_path, steps=6, donor=donor)
    assert not diary.rates
    assert trainer.state.global_step == run.step == 6


def test_a_second_training_also_ends_with_a_round(tmp_path: Path, example: Any) -> None:
    from atoll.integrations.transformers import AtollCallback

    trainer = train_alone(example, tmp_path, steps=6, eval_strategy="no")
    trainer.args.max_steps = 9  # in the middle of a period
    trainer.train()
    assert trainer.state.global_step == 9
    (ours,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, AtollCallback))
    own = vector(trainer.model)
    with ours._run.evaluating():
        assert torch.equal(vector(trainer.model), own)
