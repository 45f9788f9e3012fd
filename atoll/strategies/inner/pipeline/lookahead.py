"""Optimizers that correct the delay of an asynchronous pipeline by stepping ahead."""

from __future__ import annotations

from torch.optim import SGD, NAdam, Optimizer

from atoll.errors import ConfigError


def check_lookahead(optimizer: Optimizer) -> None:
    """Raise ConfigError unless an optimizer steps ahead, which corrects the delay."""
    nesterov = all(group.get("nesterov") for group in optimizer.param_groups)
    if isinstance(optimizer, NAdam) or (isinstance(optimizer, SGD) and nesterov):
        return
    raise ConfigError(
        'schedule = "async" needs an optimizer that looks ahead, because gradients are late',
        given=type(optimizer).__name__,
        expected="NAdam, or SGD with nesterov = true",
        remedy='optimizer = "torch:NAdam" in [train], with betas = [0.99, 0.999] and '
        'decoupled_weight_decay = true in [train.options]; or schedule = "1f1b"',
    )
