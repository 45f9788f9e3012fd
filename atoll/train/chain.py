"""One hash over all rounds of a run, by which members compare their pasts."""

from __future__ import annotations

import hashlib

from atoll.strategies.strategy import SyncResult


def chained(chain: str, sync: SyncResult) -> str:
    """Return the hash over the digests of all rounds: equal on members that always agreed.

    A result without a digest changes nothing: members take it at different times, and a later one
    has it in its own.
    """
    if not sync.digest:
        return chain
    text = f"{chain} {sync.round} {sync.digest}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
