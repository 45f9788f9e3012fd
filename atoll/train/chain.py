"""One hash over all rounds of a run, by which members compare their pasts."""

from __future__ import annotations

import hashlib

from atoll.strategies.strategy import SyncResult


def chained(chain: str, sync: SyncResult) -> str:
    """Return the hash over the digests of all rounds: equal on members that always agreed."""
    text = f"{chain} {sync.round} {sync.digest}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
