"""What the value of a key may be, as annotations of its field that msgspec checks."""

from __future__ import annotations

import re
import sys
from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(gt=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[int, Meta(ge=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""Finite."""
Share = Annotated[float, Meta(ge=0, le=1)]

CHOICES = "choices"
"""Key of the words of `one_of` in what its `Meta` carries."""


def one_of(*words: str) -> Meta:
    """Return the constraint of a text that is one of some words.

    A pattern, not a `Literal`, so that a plain `str` may be assigned to the field.
    """
    pattern = rf"\A(?:{'|'.join(map(re.escape, words))})\Z"
    return Meta(pattern=pattern, extra={CHOICES: words})
