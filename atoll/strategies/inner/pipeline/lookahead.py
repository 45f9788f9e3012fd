"""Optimizers that correct the delay of an asynchronous pipeline by stepping ahead."""

from __future__ import annotations

from torch.optim import SGD, NAdam, Optimizer

from atoll.errors import ConfigError

MUON = "ns_steps"
"""An option that only the groups of Muon have."""
NADAM = "momentum_decay"
"""An option that only the groups of NAdam have."""


def check_lookahead(optimizer: Optimizer, *, instead: str = "1f1b") -> None:
    """Raise ConfigError unless an optimizer steps ahead, which corrects the delay.

    The message names the schedule to use `instead`. Muon steps ahead on hidden matrices; embeddings
    and vectors do so only with NAdam for the rest.
    """
    groups = optimizer.param_groups
    muon = [group for group in groups if MUON in group]
    if isinstance(optimizer, NAdam) or any(group.get("nesterov") for group in muon):
        return
    if all(NADAM in group for group in groups):  # beside Muon, in a stage without hidden matrices
        return
    if isinstance(optimizer, SGD) and all(group.get("nesterov") for group in groups):
        return
    raise ConfigError(
        'schedule = "async" needs an optimizer that looks ahead, because gradients are late',
        given=type(optimizer).__name__,
        expected="Muon, NAdam, or SGD with nesterov = true",
        remedy='optimizer = "muon" in [train] with rest = "nadam" in [train.options], or '
        f'"torch:NAdam"; or schedule = "{instead}"',
    )
