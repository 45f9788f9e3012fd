"""What tests of the channel share: tiny trajectories, a critic that only remembers, bad links."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config.rl_tables import RlTable
from atoll.errors import HubUnreachable
from atoll.queues import Channel, InMemoryChannel, QueueRegistry
from atoll.queues.serialization import Parts
from atoll.rl.channel import actor_queue, actor_registry, critic_heartbeat, latest
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.channel.critic import CriticChannel
from atoll.rl.environments.spaces import Actions, TaskSpec
from atoll.rl.state_saver import StateSaver
from atoll.rl.trajectory import Trajectory
from atoll.wire.messages import Message
from tests.patience import PATIENCE_S

BOUND_S = PATIENCE_S
SPEC = TaskSpec(
    policy="light", task="x", observation=(4,), actions=Actions(kind="discrete", sizes=(2,)),
    gamma=0.99,
)  # fmt: skip


def trajectory(
    *, steps: int = 6, columns: int = 2, version: int = 0, seed: int = 0, policy: str = "light"
) -> Trajectory:
    """Return a small one, with an episode that ended and one that was cut off."""
    generator = torch.Generator().manual_seed(seed)
    terminated = torch.zeros(steps, columns, dtype=torch.bool)
    truncated = torch.zeros(steps, columns, dtype=torch.bool)
    terminated[1, 0] = truncated[2, 1] = True
    return Trajectory(
        policy=policy,
        observations=torch.randn(steps + 1, columns, 4, generator=generator),
        actions=torch.randint(0, 2, (steps, columns, 1), generator=generator),
        log_probabilities=-torch.rand(steps, columns, generator=generator),
        rewards=torch.rand(steps, columns, generator=generator),
        terminated=terminated,
        truncated=truncated,
        cut_at=torch.tensor([[2, 1]]),
        cut_observations=torch.randn(1, 4, generator=generator),
        policy_version=version,
        returns=[1.5],
    )


def registry(channel: Channel, member: str) -> QueueRegistry:
    """Return the queues of one member."""
    return QueueRegistry(channel, prefix="job", reader=member)


def hurry(monkeypatch: pytest.MonkeyPatch, *, lease_s: float = 0.4) -> None:
    """Let what takes seconds take tenths."""
    for module in (latest, actor_queue, actor_registry):
        monkeypatch.setattr(module, "WAIT_S", 0.03)
    monkeypatch.setattr(actor_queue, "LEASE_S", lease_s)
    monkeypatch.setattr(
        critic_heartbeat, "LEASE_S", lease_s - 2.0 + 0.3
    )  # what may be owed comes after 0.1
    monkeypatch.setattr(critic_heartbeat, "EXTEND_S", lease_s / 4)
    monkeypatch.setattr(critic_heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(critic_heartbeat, "LEAST_BEAT_GAP_S", 0.01)
    monkeypatch.setattr(latest, "PAUSE_S", 0.02)


def until(what: Callable[[], Any], *, bound_s: float = BOUND_S) -> Any:
    """Return the first true answer; fail when there is none in time."""
    deadline = time.monotonic() + bound_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.005)
    return found


class BadLink:
    """A channel that dies at one question, or that loses questions and answers by chance.

    Args:
        channel: The good one behind it.
        dies_at: Number of the question, from 1, at which the process is killed; 0: never.
        after: Whether that question is still carried out.
        loss: Share of questions that are lost on the way there, or on the way back.
        seed: Of chance.
    """

    def __init__(
        self, channel: Channel, *, dies_at: int = 0, after: bool = False, loss: float = 0.0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._channel, self._dies_at, self._after, self._loss = channel, dies_at, after, loss
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.requests = 0
        self.dead = False

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        """Ask, if the process lives."""
        there, back = self._fate()
        if there:
            raise HubUnreachable("killed before it", given=type(body).__name__)
        answer = self._channel.ask(body, timeout_s=timeout_s)
        if back or self.dead:
            raise HubUnreachable("killed after it", given=type(body).__name__)
        return answer

    def ask_later(self, body: Message, *, timeout_s: float) -> concurrent.futures.Future[Message]:
        """Ask at once; nothing here takes long."""
        future: concurrent.futures.Future[Message] = concurrent.futures.Future()
        try:
            future.set_result(self.ask(body, timeout_s=timeout_s))
        except BaseException as error:
            future.set_exception(error)
        return future

    def put_large(self, parts: Parts) -> tuple[str, int]:
        """Store a large payload."""
        if self.dead:
            raise HubUnreachable("killed")
        return self._channel.put_large(parts)

    def release_large(self, sha256: str) -> None:
        """Release a large payload."""
        self._channel.release_large(sha256)

    def large(self, sha256: str) -> contextlib.AbstractContextManager[Path]:
        """Give a large payload."""
        return self._channel.large(sha256)

    def close(self) -> None:
        """The good channel has an owner."""

    def _fate(self) -> tuple[bool, bool]:
        """Return whether this question is lost, and whether its answer is."""
        with self._lock:
            if self.dead:
                return True, True
            self.requests += 1
            if self.requests == self._dies_at:
                self.dead = True
                return not self._after, True
            chance = self._random.random()
            return chance < self._loss / 2, chance < self._loss


class Memory:
    """A critic that learns by remembering: what it had, how often."""

    def __init__(self, channel: Channel, rl: RlTable, *, save_every: int = 2) -> None:
        self.registry = registry(channel, "w0")
        self.side = CriticChannel(self.registry, rl=rl)
        self.keeper = StateSaver(self.registry, member="w0")
        self.learned: Counter[str] = Counter()
        self._save_every, self._updates = save_every, 0
        saved = self.keeper.newest()
        if saved is not None:
            self.learned = Counter(saved["learned"])
            self.side.load_state_dict(saved["side"])

    def learn(self, *, wait_s: float = 0.02) -> None:
        """Do one update, if there is something to learn from."""
        received = self.side.take(8, wait_s=wait_s)
        for one in received:
            self.learned[f"{one.trajectory.actor}/{one.trajectory.sequence}"] += 1
        if received:
            self._updates += 1
            self.side.publish({"x": torch.ones(2)}, version=self._updates)
        if self.side.should_save or (received and self._updates % self._save_every == 0):
            self.save()

    def save(self) -> None:
        """Save what was learned."""
        state = {"learned": dict(self.learned), "side": self.side.state_dict()}
        self.keeper.save(state, then=self.side.settling())

    def close(self, *, timeout_s: float = PATIENCE_S) -> None:
        """End it."""
        self.keeper.close(timeout_s=timeout_s)
        self.side.close(timeout_s=timeout_s)


@contextlib.contextmanager
def actor(channel: Channel, rl: RlTable, member: str = "w1") -> Iterator[ActorChannel]:
    """An actor's side that has announced itself."""
    side = ActorChannel(registry(channel, member), rl=rl, policy=SPEC.policy, member=member)
    try:
        side.announce(SPEC)
        yield side
    finally:
        side.close()


@contextlib.contextmanager
def critic(channel: Channel, rl: RlTable) -> Iterator[CriticChannel]:
    """A critic's side."""
    side = CriticChannel(registry(channel, "w0"), rl=rl)
    try:
        yield side
    finally:
        side.close()


def alone() -> InMemoryChannel:
    """Return queues in this process, which all members of a test share."""
    return InMemoryChannel()
