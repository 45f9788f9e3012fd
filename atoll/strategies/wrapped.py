"""An optimizer with an outer strategy around it: any loop that takes an optimizer takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from atoll.errors import ConfigError, GroupLeft, LeftBehind
from atoll.strategies.strategy import Outer, SyncResult
from atoll.task import Task

KEY = "atoll"
"""Name of our part in a state dict."""


class OuterOptimizer(Optimizer):
    """Wraps an optimizer: `step` combines gradients, steps, then combines parameters if due.

    Parameter groups and state are the wrapped optimizer's own objects, so learning-rate schedulers,
    gradient scalers and code that looks into them work as before. A closure is called once.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        task: Task,
        outer: Outer,
        after_step: Callable[[SyncResult | None], None],
        recover: Callable[[LeftBehind], None] | None = None,
    ) -> None:
        """Wrap `inner`, whose task and strategy are set up already.

        `recover` takes the committed state over when the group went on without this member.
        """
        self._ready = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.task, self.outer = inner, task, outer
        self._after_step, self._recover = after_step, recover
        self._adopt()
        self._ready = True

    def _adopt(self) -> None:
        """Share groups and state with the wrapped optimizer."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimizer step and whatever the strategy does around it.

        Raises:
            LossNotFinite: gradients or parameters are not finite and were about to be shared.
            GroupError: the members cannot agree any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sync: SyncResult | None = None
        try:
            with self.task.gate.moving():
                self.outer.gradients(self.task)
                self.inner.step()
                self.task.advance()
                sync = self.outer.sync(self.task)
        except LeftBehind as error:
            if self._recover is None:
                raise
            self._recover(error)
        except GroupLeft:
            # Asked to leave: the loop sees it in `run.stopping` and ends when it likes.
            sync = None
        self._after_step(sync)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what members agree on was fixed when the optimizer was wrapped.

        Raises:
            ConfigError: always, once the optimizer is wrapped.
        """
        if self._ready:
            raise ConfigError(
                "parameters cannot be added to a wrapped optimizer",
                remedy="add them before run.wrap(...)",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the strategy's under `atoll`."""
        task = self.task
        ours = {"outer": self.outer.state_dict(), "step": task.step, "tokens": task.tokens}
        return {**self.inner.state_dict(), KEY: ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned; load the model's own state first."""
        rest = dict(state_dict)
        ours = rest.pop(KEY, None)
        self.inner.load_state_dict(rest)
        self._adopt()
        if ours is not None:
            self.task.step, self.task.tokens = int(ours["step"]), int(ours["tokens"])
            self.outer.load_state_dict(ours["outer"])

    def __repr__(self) -> str:
        return f"{type(self.outer).__name__} around {self.inner!r}"
