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

from contextlib import ExitStack
from typing import Any

import torch

from atoll.errors import ConfigError
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
    """

    def __init__(self, run: Run) -> None:
        """`run` is the result of `atoll.join()`; the Trainer's optimizer is `run.wrap(...)`."""
        self._run = run
        self._agreed = ExitStack()
        self._inside = False
        self._finished = False
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Start counting tokens from the Trainer's state."""
        self._tokens = int(state.num_input_tokens_seen)

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
        """Stop with the job; load the agreed parameters before an evaluation or a save."""
        if self._run.stopping:
            control.should_training_stop = True
        self._show(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Load the agreed parameters before an evaluation or a save."""
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
        numbers: dict[str, Any] = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, int | float | torch.Tensor)
        }
        self._run.log(loss=numbers.pop("loss", None), **numbers)

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
