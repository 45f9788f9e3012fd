"""Checks of model sizes, with messages that name a valid size."""

from __future__ import annotations

import math
from typing import Any

from atoll.errors import ConfigError


def check_positive(config: Any, *names: str) -> None:
    """Check that sizes are at least 1.

    Raises:
        ConfigError: one of the fields `names` is below 1; it is named.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(
                f"the model's {name} is too small",
                given=getattr(config, name),
                expected="1 or more",
            )


def check_chance(dropout: float) -> None:
    """Check that a dropout is a probability.

    Raises:
        ConfigError: it is outside 0 <= dropout < 1.
    """
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(
            "the model's dropout is no chance", given=dropout, expected="0 <= dropout < 1"
        )


def check_heads(*, width: int, heads: int, pairs: bool) -> None:
    """Check that the width can be split evenly over the heads.

    Args:
        width: Features of a token.
        heads: Attention heads.
        pairs: Rotary positions turn pairs of features, so each head needs an even number of them.

    Raises:
        ConfigError: it cannot; the next width that can is named.
    """
    multiple = (2 if pairs else 1) * heads
    if width % multiple:
        raise ConfigError(
            "the model's width cannot be shared by its heads",
            given=f"width={width}, heads={heads}",
            expected=f"width to be a multiple of {multiple}" + (", twice the heads" * pairs),
            remedy=f"try width={math.ceil(width / multiple) * multiple}",
        )
