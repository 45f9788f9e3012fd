"""Checks of options that all parameter-server strategies have; pure."""

from __future__ import annotations

from atoll.errors import ConfigError

LATENESS = ("constant", "inverse", "power")


def check_lateness(staleness: str, power: float, limit: int) -> None:
    """Check how late pushes are treated.

    Raises:
        ConfigError: a name is unknown or a number out of range.
    """
    if staleness not in LATENESS:
        raise ConfigError(
            "the options for late pushes are not valid", given=f"staleness = {staleness!r}",
            expected=f"one of {', '.join(LATENESS)}",
        )  # fmt: skip
    if power < 0 or limit < 0:
        raise ConfigError(
            "the options for late pushes are not valid",
            given=f"staleness_power = {power}, max_staleness = {limit}",
            expected="0 or more",
        )


def check_look_ahead(share: float, optimizer: str) -> None:
    """Check how far ahead of the servers' vector members train.

    Raises:
        ConfigError: it is below 0, or the servers' optimizer has no momentum.
    """
    if share < 0 or (share and optimizer in ("sgd", "member")):
        raise ConfigError(
            "look-ahead follows the momentum of the servers' optimizer",
            given=f"look_ahead = {share}, optimizer {optimizer}",
            expected="look_ahead of 0 or more, and an optimizer of the servers with momentum",
            remedy="look_ahead = 0",
        )


SERVER_OPTIMIZERS = ("delayed-nesterov", "nesterov", "momentum", "sgd")


def check_step(optimizer: str, lr: float, momentum: float, *, of: str = "outer") -> None:
    """Check an optimizer of the servers; `of` is the first word of its options.

    Raises:
        ConfigError: the name is unknown or a number out of range.
    """
    if optimizer not in SERVER_OPTIMIZERS:
        raise ConfigError(
            f"unknown {of} optimizer", given=repr(optimizer),
            expected=f"one of {', '.join(SERVER_OPTIMIZERS)}",
        )  # fmt: skip
    if not lr > 0 or not 0 <= momentum < 1:
        raise ConfigError(
            f"the {of} optimizer cannot work with these numbers",
            given=f"{of}_lr = {lr}, {of}_momentum = {momentum}",
            expected=f"{of}_lr above 0 and {of}_momentum of 0 up to below 1",
        )
    if optimizer != "sgd" and momentum == 0:
        raise ConfigError(
            f"{of} optimizer {optimizer} does not work without momentum",
            given=f"{of}_momentum = 0", expected=f"{of}_momentum above 0 and below 1",
            remedy=f'{of}_optimizer = "sgd" has none',
        )  # fmt: skip
