"""Rates, times and shares as people write them: `20mbit`, `60ms`, `0.5%`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from atoll.errors import ConfigError

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHARES = {"": 1.0, "%": 0.01}

LOWEST_BPS = 8_000.0

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]*)\s*")


def parse_rate(text: str) -> float:
    """Return bits per second; an empty text or `unlimited` is 0, which means no limit.

    Raises:
        ConfigError: it is not a rate, or below 8 kbit/s.
    """
    if text in ("", "unlimited"):
        return 0.0
    bps = _parse("rate", text, RATES, example="20mbit")
    if bps < LOWEST_BPS:
        raise ConfigError("this rate is too low", given=text, expected="8kbit or more")
    return bps


def parse_time(text: str) -> float:
    """Return seconds; an empty text is 0."""
    return _parse("time", text, TIMES, example="60ms") if text else 0.0


def parse_share(text: str) -> float:
    """Return a share of 1; an empty text is 0.

    Raises:
        ConfigError: it is not a share, or not below 1.
    """
    share = _parse("share", text, SHARES, example="0.5%") if text else 0.0
    if share >= 1:
        raise ConfigError("this share is too large", given=text, expected="less than 100%")
    return share


def _parse(kind: str, text: str, units: Mapping[str, float], *, example: str) -> float:
    match = _QUANTITY.fullmatch(text.lower())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(
            f"this is not a {kind}",
            given=repr(text),
            expected=f"a number and one of {known}, e.g. {example}",
        )
    return float(match[1]) * units[match[2]]
