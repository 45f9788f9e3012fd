"""The actors of a critic: who has announced itself with which task, and who is done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from atoll.errors import AtollError
from atoll.rl.background import Background
from atoll.rl.channel_limits import ROSTER_ITEMS
from atoll.rl.names import Desk, Names
from atoll.rl.newest import WAIT_S
from atoll.rl.spaces import TaskSpec

log = logging.getLogger(__name__)

MOST_ACTORS = 4_096


class Roster:
    """Reads in the background what actors tell of themselves, from the beginning.

    Args:
        desk: Queues and topics.
        names: Their names.
        on_actor: Called once for each actor that was not known, in the background.
    """

    def __init__(self, desk: Desk, names: Names, *, on_actor: Callable[[str], None]) -> None:
        self.tasks: dict[str, TaskSpec] = {}
        self._on_actor = on_actor
        self._lock = threading.Lock()
        self._policies: dict[str, str] = {}
        self._done: set[str] = set()
        self._opened: set[str] = set()
        self._new: list[TaskSpec] = []
        topic = desk.topic(names.roster, max_items=ROSTER_ITEMS)
        # Nothing is acknowledged: whoever comes after this critic reads all of it again.
        self._subscription = topic.subscribe("critic", start="oldest")
        self._thread: Background | None = None

    def begin(self) -> None:
        """Begin to read."""
        self._thread = Background("reader of the roster", self._read)

    def newcomers(self) -> list[TaskSpec]:
        """Return the tasks of policies that were announced since the last call."""
        with self._lock:
            new, self._new = self._new, []
            return new

    def policy_of(self, actor: str) -> str:
        """Return whose experience an actor sends."""
        return self._policies[actor]

    def tasks_of(self) -> dict[str, str]:
        """Return the policy of each actor."""
        with self._lock:
            return dict(self._policies)

    def running(self) -> list[str]:
        """Return the actors that have not said that they are done."""
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
                log.warning("an announcement makes no sense and is passed over: %s", error)
        for actor in [actor for actor in self._policies if actor not in self._opened]:
            self._on_actor(actor)
            self._opened.add(actor)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["format"] != 1:
            log.warning("an actor speaks another version: %r", said["format"])
            return
        actor, policy = str(said["actor"]), str(said["policy"])
        with self._lock:
            if said["kind"] == "done":
                self._done.add(actor)
                return
            spec = TaskSpec.from_json(said["spec"])
            if len(self._policies) >= MOST_ACTORS and actor not in self._policies:
                log.warning("there are %d actors already; %s is not heard", MOST_ACTORS, actor)
                return
            known = self.tasks.setdefault(policy, spec)
            if known != spec:
                log.warning("%s announces %s as another task than before", actor, policy)
                return
            if known is spec:
                self._new.append(spec)
            self._done.discard(actor)
            self._policies[actor] = policy
