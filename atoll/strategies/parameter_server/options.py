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
