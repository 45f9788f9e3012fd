"""Names and limits of the queues and topics between actors and a critic, of a job or of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from atoll.config.rl_tables import RlTable
from atoll.queues import Queue, Topic


class QueueProvider(Protocol):
    """Opens queues and topics: a `Run`, or a `QueueRegistry`."""

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a queue."""
        ...

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic."""
        ...


@dataclass(frozen=True, kw_only=True)
class QueueNames:
    """The names of all queues and topics of one critic.

    In a pool names start with the pool's, and those of actors and policies with their job's: two
    jobs may both have a `w1` and a policy `light`.
    """

    pool: str = ""
    """The pool's name; empty without a pool."""
    job: str = ""
    """The job's name; only needed in a pool."""

    @classmethod
    def of(cls, rl: RlTable, *, job: str) -> QueueNames:
        """Return the names for a job's `[rl]`."""
        return cls(pool=rl.pool, job=job)

    @property
    def roster(self) -> str:
        """Topic: announcements and ends of actors."""
        return self._named("roster")

    @property
    def heartbeat(self) -> str:
        """Topic: the critic's heartbeat and how far it has read."""
        return self._named("heartbeat")

    @property
    def values(self) -> str:
        """Topic: the weights of the critic."""
        return self._named("values")

    @property
    def ask(self) -> str:
        """Queue: requests for values."""
        return self._named("ask")

    def actor(self, member: str) -> str:
        """Return a member's name among all actors."""
        return self._apart(member)

    def task_policy(self, policy: str) -> str:
        """Return a policy's name among all policies."""
        return self._apart(policy)

    def experience(self, actor: str) -> str:
        """Return the queue of an actor's trajectories."""
        return self._named(f"experience.{actor}")

    def policy(self, policy: str) -> str:
        """Return the topic of a policy's weights."""
        return self._named(f"policy.{policy}")

    def answers(self, actor: str) -> str:
        """Return the topic of the answers to an actor's requests."""
        return self._named(f"answers.{actor}")

    def _named(self, name: str) -> str:
        return f"{self.pool}/{name}" if self.pool else name

    def _apart(self, name: str) -> str:
        return f"{self.job}.{name}" if self.pool and self.job else name


BEAT_S = 1.0
"""Longest time between two heartbeats of the critic."""

LEAST_BEAT_GAP_S = 0.1
"""Shortest time between two heartbeats."""

AWAY_S = 6.0
"""Time without a heartbeat after which actors no longer wait for the critic."""

SILENT_S = 900.0
"""Time after which the critic of a pool no longer waits for a silent actor."""

LEASE_S = 20.0
"""Lease of experience: how long a dead critic keeps it from its successor."""

EXTEND_S = 5.0
"""Time between two renewals of leases by a live critic."""

ATTEMPTS = 1_000
"""Critics that may die over one trajectory before it becomes a dead letter."""

ROSTER_ITEMS = 100_000
SNAPSHOTS_KEPT = 2
STATES_KEPT = 2


def most_unsaved(rl: RlTable) -> int:
    """Return how many unsaved trajectories of one actor the critic may hold."""
    return max(2 * rl.save_every, 2 * rl.queue_items)


def queue_options(rl: RlTable) -> dict[str, Any]:
    """Return the options of an actor's queue.

    While the critic is alive, actors wait before they put more than `queue_items`, so nothing is
    dropped. Items that it has taken but not saved stay in the queue. While it is away, actors
    continue, and the oldest items make room.
    """
    return {
        "max_items": rl.queue_items + most_unsaved(rl),
        "overflow": "drop-oldest",
        "max_attempts": ATTEMPTS,
    }
