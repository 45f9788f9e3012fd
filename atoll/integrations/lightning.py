"""For Lightning's Trainer: a callback beside a wrapped optimizer.

with atoll.join() as run:
    class Module(LightningModule):
        def configure_optimizers(self):
            return run.wrap(self, torch.optim.AdamW(self.parameters(), 1e-3), outer="diloco")

    Trainer(max_steps=1000, callbacks=[AtollCallback(run)]).fit(Module(), loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.run import Run

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ConfigError(
        "lightning is not installed", remedy="pip install 'atoll[lightning]'"
    ) from error


class AtollCallback(Callback):
    """Lets a Trainer validate and save the agreed parameters, stop with the job, and log.

    Between rounds a member's own parameters are ahead of the agreed ones; validation and
    checkpoints use the agreed ones.
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
        """Log the loss; stop with the job."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._run.log(loss=loss)
        if self._run.stopping:
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
