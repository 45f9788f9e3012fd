"""Everything that a decoder of msgpack raises on bytes of a stranger."""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Besides the library's own errors: text that is not UTF-8 is a ValueError, keys that cannot be
hashed a TypeError, and nesting a thousand deep a RecursionError."""
