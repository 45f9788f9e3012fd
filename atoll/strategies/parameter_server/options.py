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
            "what is looked ahead is the way of the servers' momentum",
            given=f"look_ahead = {share}, optimizer {optimizer}",
            expected="look_ahead of 0 or more, and an optimizer of the servers with momentum",
            remedy="look_ahead = 0",
        )
