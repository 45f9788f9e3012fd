"""One hash over all rounds of a run, by which members compare their pasts."""

from __future__ import annotations

import hashlib

from atoll.strategies.strategy import SyncResult
from atoll.task import Task


def note(task: Task, sync: SyncResult | None) -> SyncResult | None:
    """Take a round into the hash of a task's past; return the same result.

    Call it before others may read the state with the new round in it: past and round belong
    together. A result without a digest changes nothing: members take it at different times, and a
    later one has it in its own.
    """
    if sync is not None and sync.digest:
        text = f"{task.past} {sync.round} {sync.digest}"
        task.past = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return sync
