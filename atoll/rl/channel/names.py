"""The queues and topics of one pooled critic, by name: of a job, or of a pool that jobs share.

How much may be under way between an actor and the critic, and for how long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from atoll.config.rl_tables import RlTable
from atoll.queues import Queue, Topic


class QueueProvider(Protocol):
    """Hands out queues and topics: a `Run`, or a `Shelf`."""

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a queue."""
        ...

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic."""
        ...


@dataclass(frozen=True, kw_only=True)
class QueueNames:
    """What everything is called.

    In a pool the names begin with that of the pool, and those of actors and policies with that of
    their job: two jobs may each have a `w1` and a policy `light`.
    """

    pool: str = ""
    """Name of the pool; empty: everything is the job's own."""
    job: str = ""
    """The job; only needed in a pool."""

    @classmethod
    def of(cls, rl: RlTable, *, job: str) -> QueueNames:
        """Return the names of a job's reinforcement learning."""
        return cls(pool=rl.pool, job=job)

    @property
    def roster(self) -> str:
        """Topic: which actors there are, and who has ended."""
        return self._named("roster")

    @property
    def heartbeat(self) -> str:
        """Topic: that the critic lives, and how far it has read."""
        return self._named("heartbeat")

    @property
    def values(self) -> str:
        """Topic: the weights of the critic."""
        return self._named("values")

    @property
    def ask(self) -> str:
        """Queue: whose values are asked."""
        return self._named("ask")

    def actor(self, member: str) -> str:
        """Return what a member is called among all actors."""
        return self._apart(member)

    def task_policy(self, policy: str) -> str:
        """Return what a policy is called among all policies."""
        return self._apart(policy)

    def experience(self, actor: str) -> str:
        """Return the queue of an actor's trajectories."""
        return self._named(f"experience.{actor}")

    def policy(self, policy: str) -> str:
        """Return the topic of a policy's weights."""
        return self._named(f"policy.{policy}")

    def answers(self, actor: str) -> str:
        """Return the topic of values that an actor has asked for."""
        return self._named(f"answers.{actor}")

    def _named(self, name: str) -> str:
        return f"{self.pool}/{name}" if self.pool else name

    def _apart(self, name: str) -> str:
        return f"{self.job}.{name}" if self.pool and self.job else name


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
