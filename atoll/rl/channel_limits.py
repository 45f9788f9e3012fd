"""How much may be under way between an actor and the critic, and for how long."""

from __future__ import annotations

from typing import Any

from atoll.config.rl_tables import RlTable

BEAT_S = 1.0
"""The critic tells at least so often that it lives."""

LEAST_BEAT_GAP_S = 0.1
"""And no more often than this, how far it has read."""

AWAY_S = 6.0
"""Without a word for so long, the critic is away and nobody waits for it."""

SILENT_S = 900.0
"""The critic of a pool does not stay for an actor of which it heard nothing for so long."""

LEASE_S = 20.0
"""How long experience is kept from others when the critic that had it dies."""

EXTEND_S = 5.0
"""A critic that lives renews its leases so often."""

ATTEMPTS = 1_000
"""Critics that may die over one trajectory before it is set aside as a dead letter."""

ROSTER_ITEMS = 100_000
SNAPSHOTS_KEPT = 2
STATES_KEPT = 2


def most_unsaved(rl: RlTable) -> int:
    """Return how many trajectories of one actor the critic may hold that are in no saved state."""
    return max(2 * rl.save_every, 2 * rl.queue_items)


def queue_options(rl: RlTable) -> dict[str, Any]:
    """Return the options of an actor's queue.

    While the critic lives, actors wait for it before they put more than `queue_items`, so nothing
    is dropped. What it has taken but not saved yet stays in the queue, too. When it is away, actors
    go on, and the oldest items make room.
    """
    return {
        "max_items": rl.queue_items + most_unsaved(rl),
        "overflow": "drop-oldest",
        "max_attempts": ATTEMPTS,
    }
