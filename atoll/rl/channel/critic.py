"""The critic's end of the channel: receives experience of all actors, sends weights.

Experience stays leased until a saved state that contains it is durable, so that the successor of a
dead critic gets it again. Trajectories that the saved state already contains are acknowledged and
not learned twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import DataError
from atoll.rl.channel.actor_queue import ActorQueue, Arrived
from atoll.rl.channel.actor_registry import ActorRegistry, SeenSequences, load_seen
from atoll.rl.channel.critic_heartbeat import CriticHeartbeat
from atoll.rl.channel.latest import LatestValue, Publisher
from atoll.rl.channel.messages import SENT_AT, decode_snapshot, decode_trajectory, encode_snapshot
from atoll.rl.channel.names import (
    SILENT_S,
    SNAPSHOTS_KEPT,
    QueueNames,
    QueueProvider,
    most_unsaved,
    queue_options,
)
from atoll.rl.environments.spaces import TaskSpec

log = logging.getLogger(__name__)

Decode = Callable[[Mapping[str, Tensor], TaskSpec | None], Any]


@dataclass(frozen=True, slots=True)
class Received:
    """One item of experience to learn from."""

    trajectory: Any
    """A `Trajectory`, or whatever `decode` returns."""
    age: int
    """Versions of its policy since then, as far as known."""
    travelled_s: float
    """Seconds since the actor's `send`, by the clocks of both machines; 0 if unknown."""


class CriticChannel:
    """Reads the queues of all actors in turn; use it from one thread."""

    def __init__(
        self,
        provider: QueueProvider,
        *,
        rl: RlTable,
        job: str = "",
        decode: Decode = decode_trajectory,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start to listen.

        `job` is only needed in a pool; `decode` returns the experience in a message.
        """
        self._provider, self._rl, self._decode, self._stopping = provider, rl, decode, stopping
        self._names = QueueNames.of(rl, job=job)
        self.counts: Counter[str] = Counter()
        """Dropped or unusual items: `stale`, `duplicate`, `damaged`, `out_of_order`."""
        self.staleness: Counter[int] = Counter()
        """Number of trajectories by their age in versions, when taken."""
        self._queues: dict[str, ActorQueue] = {}
        self._seen: dict[str, SeenSequences] = {}
        self._versions: dict[str, int] = {}
        self._arrived = threading.Condition()
        self._turn = 0
        self._last_calls: dict[str, int] = {}
        self._policies: dict[str, LatestValue] = {}
        kept = {"max_items": SNAPSHOTS_KEPT}
        self._values = Publisher(provider.topic(self._names.values, **kept))
        self._published: dict[str, Publisher] = {}
        self._roster = ActorRegistry(provider, self._names, on_actor=self._open)
        self._heartbeat = CriticHeartbeat(
            provider, self._names, beats=self._beat, every=self._extend
        )
        self._roster.begin()

    # ------------------------------------------------------------------------- actors

    def newcomers(self) -> list[TaskSpec]:
        """Return the tasks of policies announced since the last call."""
        return self._roster.newcomers()

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """The task of every announced policy, by name."""
        return self._roster.tasks

    def ended(self, *, expected: int) -> bool:
        """Return whether no more experience will arrive from at least `expected` actors."""
        queues = self._queues  # replaced in the background when an actor comes
        ended = self._roster.all_ended(expected=expected, silent=self._silent())
        if not ended or self._heartbeat.may_be_owed:
            self._last_calls = {}
            return False
        # A request that was sent before the last actor was done does not count.
        for actor, queue in queues.items():
            self._last_calls.setdefault(actor, queue.empties + 2)
        return set(self._roster.tasks_of()) <= set(queues) and all(
            not queue.depth and queue.empties >= self._last_calls[actor]
            for actor, queue in queues.items()
        )

    def _silent(self) -> list[str]:
        """Return the actors of a pool that have been silent for long.

        Their job may have been stopped or have lost its machines, and a pool gets no notice of
        it. In a job of its own the hub ends the critic, so this is empty.
        """
        if not self._rl.pool:
            return []
        since = time.monotonic() - SILENT_S
        return [actor for actor, queue in self._queues.items() if queue.received_at < since]

    @property
    def running(self) -> list[str]:
        """The announced actors that are not done."""
        return self._roster.running()

    # ------------------------------------------------------------------------- experience

    def take(self, limit: int, *, wait_s: float = 0.0, least: int = 1) -> list[Received]:
        """Return up to `limit` trajectories, one of each actor in turn.

        Waits up to `wait_s` for `least` of them.
        """
        deadline = time.monotonic() + wait_s
        items: list[Arrived] = []
        with self._arrived:
            while True:
                items += self._in_turn(limit - len(items))
                left_s = deadline - time.monotonic()
                if len(items) >= min(least, limit) or left_s <= 0 or self._stopping():
                    break
                self._arrived.wait(min(left_s, 0.25))
        if not items:
            return []
        fresh = [arrived for arrived in items if self._is_new(arrived)]
        received = [self._received(arrived) for arrived in fresh]
        self._heartbeat.soon()
        return [one for one in received if self._is_recent(one)]

    @property
    def depth(self) -> dict[str, int]:
        """Number of prefetched trajectories, by actor."""
        return {actor: queue.depth for actor, queue in self._queues.items()}

    @property
    def lost(self) -> int:
        """Number of trajectories dropped for newer ones before they arrived here."""
        return sum(seen.missing for seen in self._seen.values())

    @property
    def unsaved(self) -> int:
        """Number of trajectories taken and not in a durable state yet."""
        return sum(len(queue.held) for queue in self._queues.values())

    @property
    def should_save(self) -> bool:
        """Whether an actor has so much unsaved experience that taking more of it will soon stop."""
        most = most_unsaved(self._rl) // 2
        return any(len(queue.held) >= most for queue in self._queues.values())

    def settling(self) -> Callable[[], None]:
        """Return a function that acknowledges everything taken until now.

        Make it together with `state_dict`, when all of it is learned; call it, in any thread, once
        that state is durable.
        """
        held = [(queue, queue.held) for queue in self._queues.values()]

        def settle() -> None:
            for queue, items in held:
                queue.settle(items)

        return settle

    def _in_turn(self, limit: int) -> list[Arrived]:
        """Take one of each actor until there are enough; the next call starts at the next actor."""
        queues = list(self._queues.values())
        items: list[Arrived] = []
        idle = 0
        while queues and len(items) < limit and idle < len(queues):
            self._turn = (self._turn + 1) % len(queues)
            arrived = queues[self._turn].take()
            idle = 0 if arrived is not None else idle + 1
            if arrived is not None:
                items.append(arrived)
        return items

    def _is_new(self, arrived: Arrived) -> bool:
        """Return whether an item is valid and was not received before."""
        item = arrived.value
        if item is None:
            self.counts["damaged"] += 1
            return False
        seen = self._seen.setdefault(item.actor, SeenSequences())
        if item.sequence < seen.highest:
            self.counts["out_of_order"] += 1
        if not seen.add(item.sequence):
            self.counts["duplicate"] += 1
            return False
        newest = max(self._versions.get(item.policy, 0), item.policy_version)
        self._versions[item.policy] = newest
        return True

    def _received(self, arrived: Arrived) -> Received:
        item = arrived.value
        travelled_s = max(0.0, time.time() - arrived.sent_at) if arrived.sent_at else 0.0
        return Received(item, self._versions[item.policy] - item.policy_version, travelled_s)

    def _is_recent(self, received: Received) -> bool:
        self.staleness[received.age] += 1
        if received.age <= self._rl.staleness:
            return True
        self.counts["stale"] += 1
        count, item = self.counts["stale"], received.trajectory
        if count & (count - 1) == 0:  # log the first, second, fourth, eighth, ... only
            log.warning(
                "trajectory %d of %s (policy %s) is %d versions old and was dropped, the limit "
                "is %d; %d were so far",
                item.sequence, item.actor, item.policy, received.age, self._rl.staleness, count,
            )  # fmt: skip
        return False

    def _open(self, actor: str) -> None:
        """Start to read the queue of an actor; called in the background."""
        name = self._names.experience(actor)
        queue = ActorQueue(
            self._provider.queue(name, **queue_options(self._rl)),
            decode=lambda message: self._read(message, actor),
            ahead=self._rl.queue_items,
            most_held=most_unsaved(self._rl),
            wake=self._wake,
        )
        with self._arrived:
            self._queues = {**self._queues, actor: queue}

    def _read(self, message: Mapping[str, Tensor], actor: str) -> tuple[Any, float]:
        policy = self._roster.policy_of(actor)
        rest = dict(message) if isinstance(message, Mapping) else message
        sent = rest.pop(SENT_AT, None) if isinstance(rest, dict) else None
        item = self._decode(rest, self.tasks.get(policy))
        if (item.actor, item.policy) != (actor, policy):
            raise DataError(
                "a trajectory is in the wrong queue",
                given=f"actor {item.actor}, policy {item.policy}",
                expected=f"actor {actor}, policy {policy}",
            )
        return item, float(sent[0]) if sent is not None and sent.numel() else 0.0

    def _wake(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    # ------------------------------------------------------------------------- weights

    def publish(self, snapshot: Mapping[str, Tensor], *, version: int) -> None:
        """Publish the critic's weights in the background."""
        self._values.put(encode_snapshot(snapshot))
        self._heartbeat.version = version

    def publish_policy(self, policy: str, snapshot: Mapping[str, Tensor]) -> None:
        """Publish the weights of a policy that this learner trains, in the background."""
        if policy not in self._published:
            topic = self._provider.topic(self._names.policy(policy), max_items=SNAPSHOTS_KEPT)
            self._published[policy] = Publisher(topic)
        self._published[policy].put(encode_snapshot(snapshot))

    def newest_policy(self, policy: str) -> dict[str, Tensor] | None:
        """Return the newest weights of a policy's actor, or None if they were returned before."""
        if policy not in self._policies:
            topic = self._provider.topic(self._names.policy(policy), max_items=SNAPSHOTS_KEPT)
            self._policies[policy] = LatestValue(topic, reader="critic").begin()
        found = self._policies[policy].take()
        return None if found is None else decode_snapshot(found)

    @property
    def sent_bytes(self) -> int:
        """Bytes of published weights."""
        return self._values.sent_bytes + sum(p.sent_bytes for p in self._published.values())

    # ------------------------------------------------------------------------- state and end

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted critic needs, as JSON types."""
        return {
            "seen": {actor: seen.to_list() for actor, seen in self._seen.items()},
            "versions": dict(self._versions),
            "counts": dict(self.counts),
            "staleness": {str(age): count for age, count in self.staleness.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._seen = load_seen(state["seen"])
        self._versions = {policy: int(v) for policy, v in state["versions"].items()}
        self.counts = Counter({str(name): int(n) for name, n in state["counts"].items()})
        self.staleness = Counter({int(a): int(n) for a, n in state["staleness"].items()})

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Send what is pending, release what was not taken, and announce the critic's end."""
        for publisher in (self._values, *self._published.values()):
            publisher.close(timeout_s=timeout_s)
        self._roster.close()
        readers: list[ActorQueue | LatestValue] = [*self._queues.values(), *self._policies.values()]
        for reader in readers:
            reader.end()
        for reader in readers:
            reader.close()
        self._heartbeat.close(owed=self.unsaved > 0)

    def _beat(self) -> dict[str, int]:
        return {actor: seen.highest for actor, seen in list(self._seen.items())}

    def _extend(self) -> None:
        for queue in list(self._queues.values()):
            queue.extend()
