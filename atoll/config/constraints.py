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

EXPECTED = "expected"
"""Key of the description of a text's form in the extra data of its `Meta`."""

AUTO_DEVICE, CPU_DEVICE = "auto", "cpu"

DeviceSetting = Annotated[
    str,
    Meta(
        pattern=r"\A(?!gpu)[a-z][a-z_]*(:\d+)?\Z",
        extra={EXPECTED: "auto, cpu, or an accelerator: cuda, cuda:1, xpu, mps"},
    ),
]
"""The device to compute on."""


def agreed_device(job: str, owner: str) -> str:
    """Return the device for a process on a machine: its owner's setting counts before the job's.

    `auto` sets nothing. A job for the processor needs no accelerator that an owner offers.
    """
    if owner == AUTO_DEVICE or (job == CPU_DEVICE and owner != CPU_DEVICE):
        return job
    return owner


def one_of(*words: str) -> Meta:
    """Constrain a text to these words; unlike `Literal`, a plain `str` may be assigned."""
    pattern = rf"\A(?:{'|'.join(map(re.escape, words))})\Z"
    return Meta(pattern=pattern, extra={CHOICES: words})
