"""An optimizer with an outer strategy around its step, for use in any training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError, GroupLeft, LeftBehind
from atoll.strategies.base import Outer, SyncResult, extend_history_hash
from atoll.strategies.outer.base import OuterDefaults
from atoll.task import Task

KEY = "atoll"
"""Name of Atoll's entry in a state dict."""


class OtherOptimizers(Protocol):
    """The other ranks of this member, as the first rank sees them."""

    def arrive(self, *, overflowed: bool) -> bool:
        """Synchronize all ranks before a step; return whether gradients overflowed on any."""
        ...

    def midway(self, *, skipped: bool) -> None:
        """Let the ranks take their optimizers' step, unless it is skipped, and wait for them."""
        ...

    def go_on(self) -> None:
        """Let the ranks continue with the script."""
        ...


class WrapSpec(Optimizer):
    """Base class: exposes the groups and the state of the wrapped optimizer."""

    _step_supports_amp_scaling = True
    """Tells `GradScaler` to call `step` also when gradients have overflowed: a member that skipped
    a round by itself would be out of step with the others."""

    def __init__(self, inner: Optimizer) -> None:
        """Wrap `inner`."""
        self.inner = inner
        self._ready = False
        super().__init__(inner.param_groups, inner.defaults)
        self._ready = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._ready:
            self.inner.state = state

    @property
    def skipped(self) -> bool:
        """Whether the last step was not taken because gradients had overflowed."""
        raise NotImplementedError  # torch's Optimizer, the base, cannot have abstract methods

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimizer step and the strategy's work around it."""
        raise NotImplementedError  # see `skipped`

    @property
    def overflow_found(self) -> bool:
        """Whether a gradient scaler found an overflow in this rank's gradients.

        The scaler sets an attribute on the optimizer for the duration of one step.
        """
        found: Tensor | None = getattr(self, "found_inf", None)
        return found is not None and float(found) > 0

    def unscale(self, *, overflowed: bool) -> None:
        """Unscale gradients in place of the gradient scaler; zero them if they overflowed."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None and not overflowed:  # the loop has called `scaler.unscale_`, or has none
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if overflowed:
            for gradient in gradients:
                gradient.zero_()
        elif scale is not None:
            inverse = scale.cpu().double().reciprocal().float()  # some devices have no float64
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save; torch's hooks are called."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state_to_save()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; load the model's own state first."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        self._load_saved(dict(state))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state_to_save(self) -> dict[str, Any]:
        raise NotImplementedError  # see `skipped`

    def _load_saved(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # see `skipped`

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: a copy would be a second member of the same name.

        Raises:
            ConfigError: always, for `copy.copy`, `copy.deepcopy` and `pickle`.
        """
        raise ConfigError(
            "a wrapped optimizer cannot be copied or pickled",
            given="it belongs to this member's place in the group",
            remedy="copy its state_dict(), or copy the optimizer before run.wrap(...)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the parameters that members agree on are fixed when the optimizer is wrapped.

        Raises:
            ConfigError: always, once the optimizer is wrapped.
        """
        if self._ready:
            raise ConfigError(
                "parameters cannot be added to a wrapped optimizer",
                remedy="add them before run.wrap(...)",
            )


class OuterOptimizer(WrapSpec):
    """Wraps an optimizer: `step` combines gradients, steps, then combines parameters if due.

    Parameter groups and state are the wrapped optimizer's, so learning-rate schedulers, gradient
    scalers and code that reads them keep working. A closure is called once, unless the wrapped
    optimizer calls it several times.

    With a gradient scaler, a step with overflowed gradients makes no progress but counts for the
    schedule of rounds. Where members average gradients, all members skip it or none.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        task: Task,
        outer: Outer,
        after_step: Callable[[SyncResult | None], None],
        recover: Callable[[LeftBehind], None] | None = None,
        others: OtherOptimizers | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap `inner`, whose task and strategy are set up already.

        `before_step` runs before each step, and may run a round.
        `recover` loads the committed state after the group continued without this member. `others`
        are the other ranks of this member, if any.

        Raises:
            ConfigError: `inner` evaluates the model several times per step, and `outer` averages
                the gradients of each.
        """
        self.task, self.outer = task, outer
        self._after_step, self._recover, self._others = after_step, recover, others
        self._before_step = before_step
        self._local = not two_moments(outer)
        self._searches = needs_closure(inner)
        if self._searches and not (self._local and others is None):
            raise ConfigError(
                "this optimizer evaluates the model several times per step",
                given=f"{type(inner).__name__} with {type(outer).__name__}",
                expected="an optimizer that takes the gradients as they are, such as AdamW",
                remedy="or a method that combines parameters, such as diloco or local-sgd",
            )
        super().__init__(inner)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because gradients had overflowed.

        Where members average gradients this is equal on all, so a schedule may depend on it.
        """
        return self.task.overflowed if self._local else self.task.skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimizer step and the strategy's work around it.

        Raises:
            LossNotFinite: gradients or parameters to be sent are NaN or infinite.
            GroupError: the members cannot agree any more.
        """
        loss = None
        if closure is not None and not self._searches:
            with torch.enable_grad():
                loss = closure()
        overflowed = self.overflow_found
        if self._others is not None:
            overflowed = self._others.arrive(overflowed=overflowed)
        sync: SyncResult | None = None
        try:
            self._before_step()
            with self.task.state_lock.moving():
                self.task.overflowed, self.task.skipped = overflowed, False
                self.unscale(overflowed=overflowed)
                self.outer.gradients(self.task)
                if self._others is not None and not self._local:
                    self._others.midway(skipped=self.skipped)
                if self._searches:
                    loss = self.inner.step(closure)
                elif not self.skipped:
                    self.inner.step()
                self.task.advance()
                sync = extend_history_hash(self.task, self.outer.sync(self.task))
        except LeftBehind as error:
            if self._recover is None:
                raise
            self._recover(error)
        except GroupLeft:
            # Asked to leave: the loop sees it in `run.stopping` and ends by itself.
            sync = None
        self._after_step(sync)
        if self._others is not None:
            self._others.go_on()
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Load the agreed parameters into the model for the block."""
        agreed, state_lock = self.outer.evaluating(self.task), self.task.state_lock
        # Not held inside the block, where other threads may read the state: it does not change.
        with state_lock.moving():
            agreed.__enter__()
        try:
            yield
        finally:
            with state_lock.moving():
                agreed.__exit__(None, None, None)

    def _state_to_save(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the strategy's under `atoll`."""
        task = self.task
        ours = {"outer": self.outer.state_dict(), "step": task.step, "tokens": task.tokens}
        return {**self.inner.state_dict(), KEY: ours}

    def _load_saved(self, state: dict[str, Any]) -> None:
        ours = state.pop(KEY, None)
        self.inner.load_state_dict(state)
        if ours is not None:
            self.task.step, self.task.tokens = int(ours["step"]), int(ours["tokens"])
            self.outer.load_state_dict(ours["outer"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; the next step synchronizes them, at the same step on every member.

        Raises:
            ConfigError: the ranks of an island share this optimizer.
        """
        if self._ready and self._others is None:
            self.inner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self.outer).__name__} around {self.inner!r}"


def two_moments(outer: Outer) -> bool:
    """Return whether a strategy acts between the gradients and the optimizer's step."""
    return getattr(type(outer), "gradients", None) is not OuterDefaults.gradients


def needs_closure(kind: type[Optimizer] | Optimizer) -> bool:
    """Return whether a step evaluates the model several times, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
