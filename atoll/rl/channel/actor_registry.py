"""The critic's registry of actors: tasks, ends, and the numbers of the trajectories received."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from atoll.errors import AtollError
from atoll.rl.channel.latest import WAIT_S, Background
from atoll.rl.channel.names import ROSTER_ITEMS, QueueNames, QueueProvider
from atoll.rl.environments.spaces import TaskSpec

log = logging.getLogger(__name__)

MOST_ACTORS = 4_096


class ActorRegistry:
    """Reads the actors' announcements in the background, from the first one.

    `on_actor` is called in the background, once for each new actor.
    """

    def __init__(
        self, provider: QueueProvider, names: QueueNames, *, on_actor: Callable[[str], None]
    ) -> None:
        self.tasks: dict[str, TaskSpec] = {}
        self._on_actor = on_actor
        self._lock = threading.Lock()
        self._policies: dict[str, str] = {}
        self._done: set[str] = set()
        self._opened: set[str] = set()
        self._new: list[TaskSpec] = []
        topic = provider.topic(names.roster, max_items=ROSTER_ITEMS)
        # Acknowledge nothing: the next critic must read all announcements again.
        self._subscription = topic.subscribe("critic", start="oldest")
        self._thread: Background | None = None

    def begin(self) -> None:
        """Start to read."""
        self._thread = Background("reader of the roster", self._read)

    def newcomers(self) -> list[TaskSpec]:
        """Return the tasks of policies announced since the last call."""
        with self._lock:
            new, self._new = self._new, []
            return new

    def policy_of(self, actor: str) -> str:
        """Return the policy of an actor."""
        return self._policies[actor]

    def tasks_of(self) -> dict[str, str]:
        """Return the policy of each actor."""
        with self._lock:
            return dict(self._policies)

    def running(self) -> list[str]:
        """Return the actors that are not done."""
        with self._lock:
            return sorted(set(self._policies) - self._done)

    def all_ended(self, *, expected: int, silent: Collection[str] = ()) -> bool:
        """Return whether at least `expected` actors came, and all but the silent ones are done."""
        with self._lock:
            left = set(self._policies) - self._done - set(silent)
            return len(self._policies) >= expected and not left

    def close(self) -> None:
        """Stop reading."""
        if self._thread is not None:
            self._thread.close()

    def _read(self) -> None:
        for entry in self._subscription.read(100, wait_s=WAIT_S):
            try:
                self._hear(entry.value)
            except (AtollError, KeyError, TypeError, AttributeError, ValueError) as error:
                log.warning("a malformed announcement is ignored: %s", error)
        for actor in [actor for actor in self._policies if actor not in self._opened]:
            self._on_actor(actor)
            self._opened.add(actor)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["format"] != 1:
            log.warning("an actor uses another version: %r", said["format"])
            return
        actor, policy = str(said["actor"]), str(said["policy"])
        with self._lock:
            if said["kind"] == "done":
                self._done.add(actor)
                return
            spec = TaskSpec.from_json(said["spec"])
            if spec.policy != policy:
                log.warning("%s of %s announces the task of %s", actor, policy, spec.policy)
                return
            if len(self._policies) >= MOST_ACTORS and actor not in self._policies:
                log.warning("there are %d actors already; %s is refused", MOST_ACTORS, actor)
                return
            known = self.tasks.setdefault(policy, spec)
            if known != spec:
                log.warning("%s announces %s as another task than before", actor, policy)
                return
            if known is spec:
                self._new.append(spec)
            self._done.discard(actor)
            self._policies[actor] = policy


MOST_GAPS = 4_096
"""Largest number of remembered numbers beyond an actor's first gap."""


class SeenSequences:
    """The numbers of one actor's trajectories that were received."""

    def __init__(self, floor: int = 0, above: tuple[int, ...] = ()) -> None:
        """Start with everything up to `floor`, and the numbers in `above`."""
        self._floor = floor
        self._above = set(above)

    @property
    def highest(self) -> int:
        """The last number received."""
        return max(self._above, default=self._floor)

    @property
    def missing(self) -> int:
        """How many numbers below the last were not received, as far as remembered."""
        return self.highest - self._floor - len(self._above)

    def add(self, sequence: int) -> bool:
        """Add a number; return False if it was received before."""
        if sequence <= self._floor or sequence in self._above:
            return False
        self._above.add(sequence)
        while self._floor + 1 in self._above:
            self._floor += 1
            self._above.discard(self._floor)
        if len(self._above) > MOST_GAPS:  # old gaps were dropped for good: forget them
            ordered = sorted(self._above)
            self._floor = ordered[MOST_GAPS // 4]
            self._above = set(ordered[MOST_GAPS // 4 + 1 :])
        return True

    def to_list(self) -> list[Any]:
        """Return the numbers for a saved state."""
        return [self._floor, sorted(self._above)]

    @classmethod
    def from_list(cls, saved: list[Any]) -> SeenSequences:
        """Restore the result of `to_list`."""
        return cls(int(saved[0]), tuple(int(n) for n in saved[1]))


def load_seen(saved: Mapping[str, list[Any]]) -> dict[str, SeenSequences]:
    """Return the numbers of all actors from a saved state."""
    return {actor: SeenSequences.from_list(value) for actor, value in saved.items()}
