"""An actor's end of the channel to the critic: sends experience, receives weights.

Threads send and read, so an actor's loop never waits for the hub. It waits for the critic only
while the critic is alive and has more than `queue_items` of its trajectories to read.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import DeadlineExceeded, QueueFull
from atoll.ids import new_token
from atoll.queues import serialization
from atoll.rl.channel.latest import WAIT_S, Background, LatestValue, Publisher
from atoll.rl.channel.messages import (
    SENT_AT,
    decode_snapshot,
    encode_snapshot,
    encode_trajectory,
    float_tensor,
)
from atoll.rl.channel.names import (
    AWAY_S,
    ROSTER_ITEMS,
    SNAPSHOTS_KEPT,
    QueueNames,
    QueueProvider,
    most_unsaved,
    queue_options,
)
from atoll.rl.environments.spaces import TaskSpec

log = logging.getLogger(__name__)

LONGEST_BACK_PRESSURE_S = 60.0
"""Longest wait for a live critic that reads nothing."""

PUT_S = 20.0


class Experience(Protocol):
    """What an actor sends: a `Trajectory`, or something with the same header."""

    policy: str
    actor: str
    sequence: int
    policy_version: int
    value_version: int


class ActorChannel:
    """One actor's queue, and what it reads of the critic; use it from one thread."""

    def __init__(
        self,
        provider: QueueProvider,
        *,
        rl: RlTable,
        policy: str,
        member: str,
        job: str = "",
        encode: Callable[[Any], dict[str, Tensor]] = encode_trajectory,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the actor's queue and start to listen.

        Args:
            provider: The run, or a queue registry.
            rl: The job's `[rl]`.
            policy: The policy that acts, as named in the job file.
            member: The member that acts, e.g. `w1`.
            job: Its job; only needed in a pool.
            encode: Turns one item of experience into a message.
            stopping: Returns whether to stop waiting.
        """
        names = QueueNames.of(rl, job=job)
        self.actor, self.policy = names.actor(member), names.task_policy(policy)
        """Names of actor and policy at the critic: use them in trajectories."""
        self.sequence = 0
        """Number of the last trajectory passed to `send`."""
        self.queue_wait_s = 0.0
        self.dropped = 0
        """Trajectories dropped for newer ones, as far as known."""
        self.sent_bytes = 0
        self._rl, self._encode, self._stopping = rl, encode, stopping
        self._job = job
        self._roster = provider.topic(names.roster, max_items=ROSTER_ITEMS)
        self._queue = provider.queue(names.experience(self.actor), **queue_options(rl))
        self._condition = threading.Condition()
        self._line: collections.deque[tuple[int, dict[str, Tensor]]] = collections.deque()
        self._sending = False
        self._floor = 0
        """The critic has taken, or will never take, everything up to this trajectory."""
        self._began = time.monotonic()
        self._gone = False
        """The critic has announced its end."""
        self._heartbeat = LatestValue(
            provider.topic(names.heartbeat, max_items=1),
            reader=self.actor,
            on_news=self._on_heartbeat,
        )
        kept = {"max_items": SNAPSHOTS_KEPT}
        topic = names.policy(self.policy) if rl.algorithm == "impala" else names.values
        self._weights = LatestValue(provider.topic(topic, **kept), reader=self.actor, sparing=True)
        self._publisher: Publisher | None = None
        if rl.critic == "corrected" and rl.algorithm != "impala":
            self._publisher = Publisher(provider.topic(names.policy(self.policy), **kept))
        self._heartbeat.begin()
        self._weights.begin()
        self._sender = Background(f"sender of {self.actor}", self._send_next)

    # ------------------------------------------------------------------------- registration

    def announce(self, spec: TaskSpec) -> None:
        """Announce this actor and its task to the critic; again after every start of the process.

        Raises:
            AtollError: the hub did not accept it.
        """
        text = spec_named(spec, self.policy).to_json()
        self._tell({"kind": "here", "spec": text})

    def end(self, *, timeout_s: float = 30.0) -> None:
        """Tell the critic that this actor is done, once everything is sent.

        Raises:
            DeadlineExceeded: the hub did not accept all of it in time; the critic was not informed.
        """
        if not self.flush(timeout_s=timeout_s):
            raise DeadlineExceeded(
                "an actor could not send its last experience", given=f"{timeout_s:.0f} s",
                expected=f"the hub takes all of {self.actor}",
                remedy="check that the hub runs; the saved state of the actor has the rest",
            )  # fmt: skip
        self._tell({"kind": "done", "sequence": self.sequence})

    def _tell(self, facts: Mapping[str, Any]) -> None:
        said = {"format": 1, "actor": self.actor, "policy": self.policy, "job": self._job, **facts}
        self._roster.publish(said, key=new_token())

    # ------------------------------------------------------------------------- experience

    def send(self, item: Experience) -> None:
        """Send experience, with the actor's name, the policy's name and a number.

        Waits while a live critic has `queue_items` of this actor to read.
        """
        self.sequence += 1
        item.actor, item.policy, item.sequence = self.actor, self.policy, self.sequence
        message = self._encode(item)
        message[SENT_AT] = float_tensor(time.time())
        self._wait_for_room()
        with self._condition:
            if self.waiting > self._rl.queue_items + most_unsaved(self._rl):
                self.dropped += 1  # the hub drops its oldest item for this one
            self._line.append((self.sequence, message))
            if len(self._line) > self._rl.queue_items + self._sending:  # the hub is unreachable
                del self._line[int(self._sending)]
                self.dropped += 1
            self._condition.notify_all()

    @property
    def waiting(self) -> int:
        """Number of own trajectories that the critic has not taken yet, as far as known."""
        return max(0, self.sequence - self._floor)

    @property
    def figures(self) -> dict[str, float]:
        """The channel's values for a point."""
        return {
            "queue_wait_s": self.queue_wait_s, "queue_depth": float(self.waiting),
            "value_age_s": self.critic_away_s, "sent_bytes": float(self.sent_bytes),
            "received_bytes": float(self.received_bytes),
        }  # fmt: skip

    def add_to(self, result: dict[str, Any]) -> None:
        """Add the channel's figures to those of an actor's summary."""
        result["queue_wait_s"] = self.queue_wait_s
        result["sent_bytes"] = self.sent_bytes
        if self.dropped:
            result["dropped"] |= {"oldest": self.dropped}

    def flush(self, *, timeout_s: float = 30.0) -> bool:
        """Wait until the hub has everything that was sent; return whether it was in time."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._line:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def _wait_for_room(self) -> None:
        began = time.monotonic()
        with self._condition:
            while self.waiting > self._rl.queue_items and not self._stopping():
                waited_s = time.monotonic() - began
                if self.critic_away_s > AWAY_S or waited_s > LONGEST_BACK_PRESSURE_S:
                    break
                self._condition.wait(0.25)
        self.queue_wait_s += time.monotonic() - began

    def _send_next(self) -> None:
        with self._condition:
            if not self._line:
                self._condition.wait(WAIT_S)
            if not self._line:
                return
            sequence, message = self._line[0]  # removed only after the hub has it
            self._sending = True
        try:
            self._put(sequence, message)
            with self._condition:
                self._line.popleft()
        finally:
            with self._condition:
                self._sending = False
                self._condition.notify_all()

    def _put(self, sequence: int, message: dict[str, Tensor]) -> None:
        """Send one message to the hub; a retry with the same key is stored once."""
        try:
            self._queue.put(message, key=f"{self.actor}/{sequence}", timeout_s=PUT_S)
        except QueueFull as error:
            log.warning("trajectory %d of %s was dropped: %s", sequence, self.actor, error)
            with self._condition:
                self.dropped += 1
                self._floor = max(self._floor, sequence)
        else:
            self.sent_bytes += serialization.size(serialization.encode(message))

    # ------------------------------------------------------------------------- the critic

    @property
    def critic_away_s(self) -> float:
        """Seconds since the last heartbeat of the critic, or since the start of this actor.

        Infinite after the critic has announced its end.
        """
        if self._gone:
            return math.inf
        return time.monotonic() - max(self._began, self._heartbeat.received_at)

    def newest_values(self) -> dict[str, Tensor] | None:
        """Return the critic's newest weights, or None if they were returned before.

        With `impala` they are those of the own policy.
        """
        found = self._weights.take()
        return None if found is None else decode_snapshot(found)

    def publish_policy(self, snapshot: Mapping[str, Tensor]) -> None:
        """Publish the own policy's weights in the background, for a critic that corrects by them.

        Does nothing unless `critic = "corrected"`.
        """
        if self._publisher is not None:
            self._publisher.put(encode_snapshot(snapshot))

    @property
    def received_bytes(self) -> int:
        """Bytes received in weights and heartbeats."""
        return self._weights.received_bytes + self._heartbeat.received_bytes

    def _on_heartbeat(self, heartbeat: Any) -> None:
        if not isinstance(heartbeat, dict) or not isinstance(heartbeat.get("taken"), dict):
            return
        received = heartbeat["taken"].get(self.actor, 0)
        with self._condition:
            self._gone = bool(heartbeat.get("closed"))
            self._floor = max(self._floor, int(received))
            self._condition.notify_all()

    # ------------------------------------------------------------------------- state and end

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted actor needs, with the messages that the hub does not have yet."""
        with self._condition:
            unsent = [[sequence, dict(message)] for sequence, message in self._line]
        return {"sequence": self.sequence, "dropped": self.dropped, "unsent": unsent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; the critic recognizes repeated trajectories by their number."""
        self.sequence, self.dropped = int(state["sequence"]), int(state["dropped"])
        unsent = [(int(sequence), message) for sequence, message in state["unsent"]]
        with self._condition:
            self._floor = max(self._floor, self.sequence - len(unsent))
            self._line.extend(unsent)
            self._condition.notify_all()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Send what is pending, and end the threads."""
        self.flush(timeout_s=timeout_s)
        parts = (self._sender, self._heartbeat, self._weights)
        for part in parts:
            part.end()
        with self._condition:
            self._condition.notify_all()
        for part in parts:
            part.close()
        if self._publisher is not None:
            self._publisher.close(timeout_s=timeout_s)


def spec_named(spec: TaskSpec, policy: str) -> TaskSpec:
    """Return a task under the name that its policy has at the critic."""
    return dataclasses.replace(spec, policy=policy)
