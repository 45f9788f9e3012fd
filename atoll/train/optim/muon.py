"""Muon for the hidden matrices of a model and AdamW, or NAdam, for everything else, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, NAdam, Optimizer

from atoll.devices.optimizers import has_fused
from atoll.errors import ConfigError, unknown
from atoll.strategies.inner.model_facts import hidden_matrices

LR_SCALE = "lr_scale"
"""Key of a parameter group: its rate as a share of the schedule's."""

ADAMW_SHARE = 0.2
"""Default of AdamW's rate as a share of Muon's: 4e-3 beside 0.02."""

RESTS = ("adamw", "nadam")
"""Optimizers of what is not a hidden matrix."""


class CombinedOptimizer(Optimizer):
    """Several optimizers that look like one: one list of groups, one state, one step.

    The parts share their groups and states with the whole, so that schedules and checkpoints see
    all parameters.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, dict(parts[0].defaults))
        self._parts = list(parts)
        self._counts = [len(part.param_groups) for part in parts]
        self._share()

    def _share(self) -> None:
        """Give each part its groups and the shared state."""
        first = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part; a closure is called once, first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()


def muon(
    model: nn.Module,
    *,
    lr: float = 0.02,
    adamw_lr: float | None = None,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    rest: str = RESTS[0],
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return Muon on the hidden matrices of a model and AdamW on all other trained parameters.

    Hidden matrices are all but embeddings and the output layer. Muon makes each update nearly
    orthogonal, and keeps one momentum instead of two.

    Args:
        model: The model to train.
        lr: Muon's rate; an update of a matrix with at least as many columns as rows has about the
            spectral norm `lr`.
        adamw_lr: AdamW's rate; a fifth of `lr` by default.
        weight_decay: Decoupled decay of matrices; vectors do not decay.
        betas: AdamW's two decay rates.
        rest: `nadam` takes Nesterov steps, as Muon does; for asynchronous pipelines.
        options: Further options of `torch.optim.Muon`, e.g. `momentum`, `ns_steps`.

    Raises:
        ConfigError: the model has no hidden matrix, this torch has no Muon, or `rest` is unknown.
    """
    hidden = hidden_matrices(model)
    if not hidden:
        raise ConfigError(
            "the model has no hidden matrix for Muon",
            expected="a trained 2-D parameter that is neither an embedding nor the output layer",
            remedy='take optimizer = "adamw"',
        )
    return muon_over(
        model, hidden, rates=(lr, adamw_lr), weight_decay=weight_decay, betas=betas, rest=rest,
        options=options or {},
    )  # fmt: skip


def muon_over(
    model: nn.Module,
    hidden: Sequence[nn.Parameter],
    *,
    rates: tuple[float, float | None],
    weight_decay: float,
    betas: tuple[float, float],
    rest: str,
    options: Mapping[str, Any],
) -> Optimizer:
    """Like `muon` for a part of a model, which may have no `hidden` matrix of the whole.

    `rates` are Muon's and AdamW's.
    """
    if rest not in RESTS:
        raise unknown("optimizer beside Muon", rest, RESTS)
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ConfigError(
            "this torch has no Muon",
            given=f"torch {torch.__version__}", expected="torch 2.9 or newer",
            remedy='take optimizer = "adamw", or update torch',
        )  # fmt: skip
    ids = {id(parameter) for parameter in hidden}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    if not hidden and not others:
        raise ConfigError("there is nothing to train", expected="a stage with weights")
    lr, adamw_lr = rates
    parts: list[Optimizer] = []
    if hidden:
        parts.append(kind(hidden, lr=lr, weight_decay=weight_decay, **options))
    if others:
        rate = lr * ADAMW_SHARE if adamw_lr is None else adamw_lr
        groups = decay_groups(others, weight_decay=weight_decay)
        if rest == "nadam":
            beside: Optimizer = NAdam(groups, lr=rate, betas=betas, decoupled_weight_decay=True)
        else:
            beside = AdamW(groups, lr=rate, betas=betas, fused=has_fused(others[0].device))
        parts.append(beside)
        for group in beside.param_groups:
            group[LR_SCALE] = rate / lr
    return CombinedOptimizer(parts)


def decay_groups(parameters: Sequence[Tensor], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return non-empty parameter groups in which only matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
