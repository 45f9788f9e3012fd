"""The base class of every message on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""A whole number that every database can store."""

Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Neither NaN nor infinite: JSON has no such numbers, and what a hub keeps is JSON."""

WallTime = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Seconds since 1970, neither NaN nor infinite."""

Name = Annotated[str, msgspec.Meta(max_length=255)]
"""A job, member or process: no address of a session is longer."""

Digest = Annotated[str, msgspec.Meta(max_length=255)]
"""A hash, with what it is of."""

MOST_ITEMS = 1_000
"""Lines, points or leases of one message: the hub handles it in one transaction, for which others
wait."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; its tag on the wire is the class name."""
