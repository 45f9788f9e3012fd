"""Constraints on values, as field annotations that msgspec checks."""

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
"""Finite and not negative."""
Share = Annotated[float, Meta(ge=0, le=1)]

CHOICES = "choices"
"""Key of the words of `one_of` in the extra data of its `Meta`."""


def one_of(*words: str) -> Meta:
    """Constrain a text to these words; unlike `Literal`, a plain `str` may be assigned."""
    pattern = rf"\A(?:{'|'.join(map(re.escape, words))})\Z"
    return Meta(pattern=pattern, extra={CHOICES: words})
