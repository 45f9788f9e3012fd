"""Inner optimizers and learning-rate schedules of the built-in trainer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.config import OPTIMIZERS, TORCH_OPTIMIZER, TrainTable
from atoll.devices.choose import device_of_model
from atoll.devices.optimizers import has_fused
from atoll.errors import ConfigError, unknown
from atoll.strategies.wrapped_optimizer import needs_closure
from atoll.train.optim.lazy_compiler import leave_out_compiler
from atoll.train.optim.muon import LR_SCALE, RESTS, decay_groups, muon, muon_over

SCHEDULES = ("cosine", "constant")


def build_optimizer(
    model: nn.Module, table: TrainTable, *, hidden: Sequence[nn.Parameter] | None = None
) -> Optimizer:
    """Return the optimizer of a `[train]` table; only matrices decay.

    It uses torch's fused kernels where the model's device has them: one call instead of a dozen
    per tensor, a measurable part of a step of small models.

    Args:
        model: What it trains.
        table: The optimizer and its options.
        hidden: For a part of a model: which of its parameters are hidden matrices of the whole.

    Raises:
        ConfigError: the optimizer is unknown, or one of its options is wrong.
    """
    leave_out_compiler()
    options, decay = dict(table.options), table.weight_decay
    betas = (table.betas[0], table.betas[1])
    if table.optimizer == "muon":
        return _muon(model, table, options, betas=betas, hidden=hidden)
    fused = has_fused(device_of_model(model))
    groups = decay_groups([p for p in model.parameters() if p.requires_grad], weight_decay=decay)
    if table.optimizer == "adamw":
        own = {"betas": betas, "fused": fused}
        return _make(torch.optim.AdamW, groups, table, own | options)
    if table.optimizer == "sgd":
        own = {"momentum": table.momentum, "fused": fused}
        return _make(torch.optim.SGD, groups, table, own | options)
    prefix, name = table.optimizer[: len(TORCH_OPTIMIZER)], table.optimizer[len(TORCH_OPTIMIZER) :]
    if prefix != TORCH_OPTIMIZER:
        known = [*OPTIMIZERS, *(TORCH_OPTIMIZER + name for name in torch_optimizers())]
        raise unknown("optimizer", table.optimizer, known)
    kinds = torch_optimizers()
    if name not in kinds:
        raise unknown("optimizer of torch", name, kinds)
    if "weight_decay" not in inspect.signature(kinds[name]).parameters:
        groups = [{"params": group["params"]} for group in groups]
    return _make(kinds[name], groups, table, options)


def torch_optimizers() -> dict[str, type[Optimizer]]:
    """Return torch's optimizers by name, except those that evaluate the model themselves."""
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    return {name: kind for name, kind in found.items() if not needs_closure(kind)}


def _muon(
    model: nn.Module, table: TrainTable, options: dict[str, Any], *, betas: tuple[float, float],
    hidden: Sequence[nn.Parameter] | None,
) -> Optimizer:  # fmt: skip
    adamw_lr, rest = options.pop("adamw_lr", None), options.pop("rest", RESTS[0])
    kind = getattr(torch.optim, "Muon", None)
    if kind is not None:  # without it, the call below raises the error
        _check_options(kind, options, more=("adamw_lr", "rest"))
    with _Refused("muon", table.options):
        if hidden is not None:
            return muon_over(
                model, hidden, rates=(table.lr, adamw_lr), weight_decay=table.weight_decay,
                betas=betas, rest=rest, options=options,
            )  # fmt: skip
        return muon(
            model, lr=table.lr, adamw_lr=adamw_lr, weight_decay=table.weight_decay, betas=betas,
            rest=rest, options=options,
        )  # fmt: skip


def _make(
    kind: Callable[..., Optimizer], groups: Any, table: TrainTable, options: Mapping[str, Any]
) -> Optimizer:
    _check_options(kind, options)
    with _Refused(table.optimizer, table.options):
        return kind(groups, lr=table.lr, **options)


def _check_options(
    kind: Callable[..., Optimizer], options: Mapping[str, Any], *, more: tuple[str, ...] = ()
) -> None:
    """Refuse options that an optimizer does not have."""
    reserved = {"params", "lr", "weight_decay"}  # set from the model and from [train] itself
    known = (set(inspect.signature(kind).parameters) | set(more)) - reserved
    for name in options:
        if name not in known:
            raise unknown("key in [train.options]", name, known)


class _Refused:
    """Turns an optimizer's error about its arguments into a ConfigError."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, dict(options)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | TypeError | RuntimeError):
            raise ConfigError(
                f"the optimizer {self._name} refuses its options",
                given=f"{self._options}: {' '.join(str(error).split())}",
                remedy="see torch's documentation of this optimizer",
            ) from error


def learning_rate(table: TrainTable) -> Callable[[int], float]:
    """Return the rate by step, counted from 0: linear warm-up, then the schedule.

    It depends on the step alone, so a member that joins late uses the same rate as the others.

    Raises:
        ConfigError: the schedule is unknown.
    """
    if table.schedule not in SCHEDULES:
        raise unknown("schedule", table.schedule, SCHEDULES)
    span = max(1, table.steps - table.warmup)

    def rate(step: int) -> float:
        if step < table.warmup:
            return table.lr * (step + 1) / table.warmup
        if table.schedule == "constant":
            return table.lr
        progress = min(1.0, (step - table.warmup) / span)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return table.lr * (table.final_lr + (1.0 - table.final_lr) * cosine)

    return rate


class StepSchedule:
    """Sets an optimizer's rate as a function of the step; cheaper than torch's schedulers."""

    def __init__(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        self._optimizer, self._rate = optimizer, rate
        self._step = 0
        self._apply()

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return self._rate(self._step)

    def step(self) -> None:
        """Advance to the rate of the next step."""
        self._step += 1
        self._apply()

    def _apply(self) -> None:
        rate = self._rate(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get(LR_SCALE, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved step."""
        self._step = int(state["step"])
        self._apply()
