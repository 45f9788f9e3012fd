"""The base of every message on the wire."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; the class name is its tag on the wire."""
