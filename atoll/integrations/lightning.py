"""For Lightning's Trainer: a callback beside a wrapped optimizer.

with atoll.join() as run:
    class Module(LightningModule):
        def configure_optimizers(self):
            return run.wrap(self, torch.optim.AdamW(self.parameters(), 1e-3), outer="diloco")

    Trainer(max_steps=1000, callbacks=[AtollCallback(run)]).fit(Module(), loader)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.integrations.progress import go_to_step, step_to_follow
from atoll.run import Run

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
except ImportError as error:
    raise ConfigError(
        "lightning is not installed", remedy="pip install 'atoll[lightning]'"
    ) from error


class WrappedMixedPrecision(MixedPrecision):
    """Mixed precision that clips the gradients of a wrapped optimizer.

    Lightning refuses to clip for optimizers that unscale gradients in `step`, as a wrapped one does
    unless they are unscaled already. So they are unscaled before they are clipped.
    """

    def clip_gradients(self, optimizer: Any, *args: Any, **options: Any) -> None:
        """Unscale the gradients, then clip them."""
        if self.scaler is not None:
            self.scaler.unscale_(getattr(optimizer, "optimizer", optimizer))
        Precision.clip_gradients(self, optimizer, *args, **options)


class AtollCallback(Callback):
    """Lets a Trainer validate and save the agreed parameters, stop with the job, and log.

    Between rounds a member's own parameters are ahead of the agreed ones; validation and
    checkpoints use the agreed ones. A member that joins late, recovers or resumes makes the Trainer
    go on at the group's step, with the learning rate of that step.
    """

    def __init__(self, run: Run, *, tokens: Callable[[Any], int] | None = None) -> None:
        """For a Trainer with a module that returns `run.wrap(...)` from `configure_optimizers`.

        Args:
            run: The result of `atoll.join()`.
            tokens: Returns the tokens or samples of a batch, the weight of a member; None: weight
                by steps.
        """
        self._run, self._count = run, tokens
        self._agreed = ExitStack()
        self._inside = False
        self._last_step = math.inf

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let gradients be clipped in mixed precision."""
        plugin = trainer.precision_plugin
        if type(plugin) is MixedPrecision:
            precision: Any = plugin.precision
            trainer.strategy.precision_plugin = WrappedMixedPrecision(
                precision, plugin.device, plugin.scaler
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on at the group's step, in the pass over the data that it belongs to."""
        if not self._follow(trainer):
            return
        step, batches = trainer.global_step, trainer.num_training_batches
        if not pl_module.automatic_optimization or math.isinf(batches):
            return
        self._last_step = trainer.estimated_stepping_batches
        number = step // math.ceil(batches / trainer.accumulate_grad_batches)
        passes: Any = trainer.fit_loop.epoch_progress
        for count in (passes.total, passes.current):
            count.ready = count.started = count.processed = count.completed = number
        for config in trainer.lr_scheduler_configs:
            if config.interval == "epoch":
                go_to_step(config.scheduler, number // config.frequency)

    def _follow(self, trainer: Trainer) -> bool:
        """Set Trainer and schedules to the group's step; return whether they were elsewhere."""
        loop = trainer.fit_loop.epoch_loop
        if trainer.lightning_module.automatic_optimization:
            counts = loop.automatic_optimization.optim_progress.optimizer.step.total
        elif len(trainer.optimizers) == 1:
            counts = loop.manual_optimization.optim_step_progress.total
        else:  # the Trainer counts the steps of all optimizers, the group those of one
            return False
        step = step_to_follow(self._run, trainer_step=counts.completed)
        if step is None:
            return False
        counts.ready = counts.completed = loop._batches_that_stepped = step
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                go_to_step(config.scheduler, step // config.frequency)
        return True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the tokens of the batch."""
        if self._count is not None:
            self._run.log(tokens=self._count(batch))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the loss; go on at the group's step; stop with the job."""
        self._follow(trainer)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._run.log(loss=loss)
        if self._run.stopping or trainer.global_step >= self._last_step:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the agreed parameters."""
        if not self._inside:
            self._agreed.enter_context(self._run.evaluating())
            self._inside = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the member's own parameters."""
        self._agreed.close()
        self._inside = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the member's own parameters after an error in a validation."""
        # With the error, so that no rank of an island waits for one that does not come.
        self._agreed.__exit__(type(exception), exception, exception.__traceback__)
        self._inside = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the agreed parameters, not the member's own."""
        if self._inside:
            return
        with self._run.evaluating():
            state = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: value.clone() for name, value in state.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Synchronize the last steps, so that all members end with the same model."""
        self._run.finish()
