"""Checks of model sizes with messages that suggest a valid size."""

from __future__ import annotations

import math
from typing import Any

from atoll.errors import ConfigError


def check_positive(config: Any, *names: str) -> None:
    """Raise ConfigError for the first of the fields `names` that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(
                f"the model's {name} is too small",
                given=getattr(config, name),
                expected="1 or more",
            )


def check_deviation(std: float) -> None:
    """Raise ConfigError unless a standard deviation is positive and finite."""
    if not 0.0 < std < math.inf:
        raise ConfigError(
            "the model's embedding_std is out of range", given=std, expected="a positive number"
        )


def check_chance(dropout: float) -> None:
    """Raise ConfigError unless 0 <= dropout < 1."""
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(
            "the model's dropout is out of range", given=dropout, expected="0 <= dropout < 1"
        )


def check_heads(*, width: int, heads: int, pairs: bool) -> None:
    """Raise ConfigError unless the heads divide the width; suggests the next valid width.

    `pairs`: rotary positions rotate pairs, so each head needs an even number of features.
    """
    multiple = (2 if pairs else 1) * heads
    if width % multiple:
        raise ConfigError(
            "the model's width cannot be shared by its heads",
            given=f"width={width}, heads={heads}",
            expected=f"width to be a multiple of {multiple}" + (", twice the heads" * pairs),
            remedy=f"try width={math.ceil(width / multiple) * multiple}",
        )
