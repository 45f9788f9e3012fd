"""For `transformers.Trainer`: a callback beside a wrapped optimizer.

with atoll.join() as run:
    optimizer = run.wrap(model, torch.optim.AdamW(model.parameters(), 1e-3), outer="diloco")
    Trainer(
        model,
        TrainingArguments(output_dir=str(run.directory / "trainer"), max_steps=1000),
        train_dataset=run.shard(dataset),
        optimizers=(optimizer, None),
        callbacks=[AtollCallback(run)],
    ).train()
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.integrations.progress import go_to_step, step_to_follow
from atoll.run import Run

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError("transformers is not installed", remedy="pip install 'atoll[hf]'") from error


class AtollCallback(TrainerCallback):
    """Lets a Trainer evaluate and save the agreed parameters, stop with the job, and log.

    Between rounds a member's own parameters are ahead of the agreed ones. After a step with an
    evaluation or save, the agreed ones are loaded until the next step. With
    `include_num_input_tokens_seen` members are weighted by tokens, otherwise by steps.

    A member that joins late, recovers or resumes makes the Trainer go on at the group's step: with
    the learning rate of that step, that far in its data, and only until `max_steps`.
    """

    def __init__(self, run: Run) -> None:
        """`run` is the result of `atoll.join()`; the Trainer's optimizer is `run.wrap(...)`."""
        self._run = run
        self._agreed = ExitStack()
        self._inside = False
        self._finished = False
        self._tokens = 0
        self._own_steps = 0
        self._marks = {"loss": _Mark(), "train_loss": _Mark()}
        """By name of a mean loss: where the Trainer began to sum it."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Start counting tokens from the Trainer's state; go on at the group's step."""
        self._tokens = int(state.num_input_tokens_seen)
        self._marks = {name: _Mark(state.global_step) for name in self._marks}
        self._own_steps = 0
        self._finished = False
        if self._follow(state, control, more["lr_scheduler"]):
            _skip(more.get("train_dataloader"), args, state)

    def _follow(self, state: TrainerState, control: TrainerControl, schedule: Any) -> bool:
        """Set Trainer and schedule to the group's step; return whether they were elsewhere."""
        step = step_to_follow(self._run, trainer_step=state.global_step)
        if step is None:
            return False
        before, state.global_step = state.global_step, step
        go_to_step(schedule, step)
        if step >= state.max_steps:
            control.should_training_stop = True
        elif before >= state.max_steps:
            control.should_training_stop = False
        return True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Log the tokens of the step, the weight of this member."""
        seen = int(state.num_input_tokens_seen)
        self._run.log(tokens=seen - self._tokens)
        self._tokens = seen

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Restore the member's own parameters."""
        self._leave()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Restore the member's own parameters."""
        self._leave()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Go on at the group's step, stop with the job, load the agreed parameters if needed."""
        self._own_steps += 1
        self._follow(state, control, more["lr_scheduler"])
        if self._run.stopping:
            control.should_training_stop = True
        self._show(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Load the agreed parameters before an evaluation or a save."""
        loader: Any = more.get("train_dataloader")
        if getattr(loader, "skip_batches", 0):
            loader.skip_batches = 0
            more["model"].zero_grad()  # a shortened pass may end between two steps
        self._leave()
        self._show(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Synchronize the last steps, unless done already; a loaded best model stays."""
        model = more["model"]
        best = None
        if self._inside and args.load_best_model_at_end:
            best = {name: value.clone() for name, value in model.state_dict().items()}
        self._leave()
        self._finish()
        if best is not None:
            model.load_state_dict(best)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Log the Trainer's measurements."""
        for name in self._marks.keys() & (logs or {}).keys():
            self._correct(name, state, logs)
        numbers: dict[str, Any] = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, int | float | torch.Tensor)
        }
        self._run.log(loss=numbers.pop("loss", None), **numbers)

    def _correct(self, name: str, state: TrainerState, logs: Any) -> None:
        """Correct a mean that the Trainer divided by the group's steps, not only by its own."""
        mark, self._marks[name] = self._marks[name], _Mark(state.global_step, self._own_steps)
        divided_by, own = state.global_step - mark.step, self._own_steps - mark.own_steps
        if own and divided_by > 0 and own != divided_by:
            logs[name] = state.log_history[-1][name] = logs[name] * divided_by / own

    def _show(self, control: TrainerControl) -> None:
        if control.should_training_stop:
            # After the last step the Trainer must see the final model.
            self._finish()
        elif control.should_evaluate or control.should_save:
            self._agreed.enter_context(self._run.evaluating())
            self._inside = True

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._run.finish()

    def _leave(self) -> None:
        self._agreed.close()
        self._inside = False


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point of the training."""

    step: int = 0
    """Step of the group."""
    own_steps: int = 0
    """Steps that this process has taken."""


def _skip(loader: Any, args: TrainingArguments, state: TrainerState) -> None:
    """Leave out the batches of the current pass that the group's steps have used up.

    After the last step all are left out, since the Trainer would otherwise take one more step.
    """
    if not hasattr(loader, "skip_batches"):
        return
    batches = state.global_step * args.gradient_accumulation_steps
    if state.global_step >= state.max_steps:
        loader.skip_batches = sys.maxsize
        return
    if args.ignore_data_skip:
        return
    try:
        steps_of_pass = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
    except TypeError:  # a stream
        loader.skip_batches = batches
    else:
        done = state.global_step % steps_of_pass
        loader.skip_batches = done * args.gradient_accumulation_steps
