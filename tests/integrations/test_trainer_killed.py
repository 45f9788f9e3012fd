"""A `transformers.Trainer` whose process is killed: its next process goes on with the group."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, until

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytestmark = pytest.mark.e2e

STEPS, EVERY, KILL_AFTER = 60, 5, 12

SCRIPT = f"""
import os, pathlib, sys, time
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
import atoll
from atoll.integrations.transformers import AtollCallback

folder = pathlib.Path(sys.argv[1])

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, labels):
        return {{"loss": (self.layer(x) - labels).square().mean()}}

class Diary(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        rate = more["lr_scheduler"].get_last_lr()[0]
        with (folder / f"{{run.member}}-{{os.getpid()}}").open("a") as file:
            print(state.global_step, rate, file=file)
        if state.global_step == {KILL_AFTER + 1} and first == "w1":
            time.sleep(600)  # it is killed here, however late that is seen

with atoll.join() as run:
    first = "" if list(folder.glob(f"{{run.member}}-*")) else run.member
    model = Line()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer = run.wrap(model, inner, outer=atoll.DiLoCo(every={EVERY}))
    rows = [{{"x": torch.tensor([n / 600]), "labels": torch.tensor([n / 300])}} for n in range(600)]
    settings = TrainingArguments(
        output_dir=str(run.directory / "trainer"), max_steps={STEPS}, save_strategy="no",
        per_device_train_batch_size=4, report_to=[], disable_tqdm=True, logging_steps=10,
    )
    trainer = Trainer(
        model, settings, train_dataset=run.shard(rows), optimizers=(optimizer, None),
        callbacks=[AtollCallback(run), Diary()],
    )
    trainer.train()
    assert run.step == trainer.state.global_step == {STEPS}, (run.step, trainer.state.global_step)
"""


def lived(path: Path) -> dict[int, float]:
    """Return the learning rate after each step that a process has done."""
    lines = [line.split() for line in path.read_text().splitlines()]
    rates = {int(step): float(rate) for step, rate in lines}
    assert list(rates) == sorted(rates)
    assert len(rates) == len(lines), "no step is done twice"
    return rates


@pytest.mark.long(
    "tests/integrations/test_transformers.py"
    "::test_a_member_that_recovers_goes_on_at_the_groups_step"
)
def test_a_killed_trainer_comes_back_at_the_groups_step(atoll: Atoll) -> None:
    script, diaries = atoll.folder / "train.py", atoll.folder / "diaries"
    script.write_text(SCRIPT)
    diaries.mkdir()
    both = "job.nodes={min = 2, max = 2}"  # the other waits until it is back
    running = atoll.start("run", str(script), "--local", "2", "--set", both, "--", str(diaries))

    def late_enough() -> Path | None:
        found = list(diaries.glob("w1-*"))
        return found[0] if found and len(found[0].read_text().splitlines()) > KILL_AFTER else None

    victim: Path = until(late_enough)
    os.kill(int(victim.name.partition("-")[2]), signal.SIGKILL)
    done = running.wait()
    assert done.code == 0, done.both
    (other,) = diaries.glob("w0-*")
    (again,) = set(diaries.glob("w1-*")) - {victim}
    steps, rates = lived(again), lived(other)
    assert list(rates) == list(range(1, STEPS + 1))
    assert list(steps) == list(range(min(steps), STEPS + 1)), "from the group's step to max_steps"
    assert KILL_AFTER - EVERY < min(steps) - 1 <= max(lived(victim)) + EVERY
    assert steps == {step: rates[step] for step in steps}, "with the schedule of that step"
    summary = json.loads((atoll.job_folder() / "summary.json").read_text())
    assert summary["replicas_identical"]
