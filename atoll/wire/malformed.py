"""The exceptions that decoding untrusted msgpack bytes can raise."""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Text that is not UTF-8 raises ValueError, an unhashable key TypeError, and a thousand levels of
nesting RecursionError."""
