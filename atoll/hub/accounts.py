"""What a member tells of its period, made fit to be shown: absurd figures are left out and named.

An account is for people. Nothing that is decided about a round may depend on it, so a member that
lies in it harms nobody.
"""

from __future__ import annotations

import math

import msgspec

from atoll.wire.messages import Account, RoundJoin

PHASES = ("wait", "send", "vote", "apply", "upload")
"""Seconds that an account may name; others are dropped."""

LONGEST_S = 30 * 86_400.0
"""A phase that takes longer is taken for a mistake."""

LARGEST = 1e30
"""A loss or a norm beyond this is taken for a mistake."""


def tidy(join: RoundJoin) -> tuple[RoundJoin, list[str]]:
    """Return a join whose account holds only usable figures, and what was wrong with the others.

    Each complaint begins with the name of the figure, e.g. ``loss is nan``.
    """
    account = join.account
    if account is None:
        return join, []
    odd: list[str] = []
    phases: dict[str, float] = {}
    for name in PHASES:
        if name in account.phases:
            seconds = usable(account.phases[name], name, odd, least=0.0, most=LONGEST_S)
            if seconds is not None:
                phases[name] = seconds
    if not account.phases.keys() <= set(PHASES):
        odd.append("phases have unknown names")
    clean = Account(
        phases=phases,
        update_norm=usable(account.update_norm, "update_norm", odd, least=0.0, most=LARGEST),
        loss=usable(account.loss, "loss", odd, least=-LARGEST, most=LARGEST),
    )
    return msgspec.structs.replace(join, account=clean), odd


def usable(
    value: float | None, name: str, odd: list[str], *, least: float, most: float
) -> float | None:
    """Return a figure if it can be true; else None, and the complaint goes to `odd`."""
    if value is None:
        return None
    if math.isfinite(value) and least <= value <= most:
        return value
    odd.append(f"{name} is {value:.3g}")
    return None
