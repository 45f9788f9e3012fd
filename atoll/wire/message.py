"""The base class of every message on the wire."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; its tag on the wire is the class name."""
