"""The base class of every message on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""A whole number that every database can store."""

WallTime = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Seconds since 1970, neither NaN nor infinite."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; its tag on the wire is the class name."""
