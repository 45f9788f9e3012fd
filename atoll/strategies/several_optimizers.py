"""Several optimizers of one replica, e.g. those of a generator and a discriminator.

All models together are one replica: one vector, one round, one checkpoint. Steps of the last
optimizer count, and the outer strategy acts around them only; the others step without a round.
See docs/decisions/0007-several-optimizers-are-one-replica.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.strategies.wrapped_optimizer import WrapSpec, needs_closure
from atoll.task import Task

COMPILED = "_orig_mod"
"""Name under which the result of `torch.compile(model)` holds the model."""

PARTS = "optimizers"
"""Key of the optimizers' states in the state of a `JointOptimizer`."""


class JointOptimizer(Optimizer):
    """`Task.optimizer` of several optimizers: the groups and the state of all of them."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Represent `parts`, in their order."""
        self.parts = list(parts)
        parameters = [p for part in parts for group in part.param_groups for p in group["params"]]
        super().__init__(list(dict.fromkeys(parameters)), {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore what torch's constructor sets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Ignore what torch's constructor adds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers."""
        return {PARTS: [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it was saved from other optimizers, or another number of them.
        """
        states = state_dict[PARTS]
        if len(states) != len(self.parts):
            raise ValueError(f"{len(states)} optimizers were saved, given {len(self.parts)}")
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class PartOptimizer(WrapSpec):
    """An optimizer before the last of a replica: `step` takes its step, and no round follows."""

    def __init__(self, inner: Optimizer, *, task: Task) -> None:
        """Wrap `inner`, one of the optimizers of `task`."""
        self._task, self._skipped = task, False
        self._searches = needs_closure(inner)
        super().__init__(inner)

    @property
    def skipped(self) -> bool:
        """Whether the last step was not taken because gradients had overflowed."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step of this optimizer."""
        loss = None
        if closure is not None and not self._searches:
            with torch.enable_grad():
                loss = closure()
        self._skipped = self.overflow_found
        with self._task.state_lock.moving():
            self.unscale(overflowed=self.skipped)
            if self._searches:
                loss = self.inner.step(closure)
            elif not self.skipped:
                self.inner.step()
        return loss

    def _state_to_save(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; the strategy's is with the last optimizer."""
        return self.inner.state_dict()

    def _load_saved(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def __repr__(self) -> str:
        return f"one of several: {self.inner!r}"


def one_model(models: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a module that contains all models, without the wrappers of `torch.compile`.

    So a checkpoint has the same names whether the script compiles its model or not.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(models, nn.Module):
        return _uncompiled(models)
    if not models:
        raise ConfigError("there is no model to train", remedy="run.wrap(model, optimizer)")
    found = [_uncompiled(model) for model in models]
    return nn.ModuleList(found) if len(found) > 1 else found[0]


def _uncompiled(model: nn.Module) -> nn.Module:
    while (inner := model._modules.get(COMPILED)) is not None:
        model = inner
    return model


def as_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return a list of one or several optimizers.

    Raises:
        ConfigError: there is none.
    """
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if not found:
        raise ConfigError("there is no optimizer to wrap", remedy="run.wrap(model, optimizer)")
    return found


def joint(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer for all of them; a single one is returned as it is."""
    return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)
