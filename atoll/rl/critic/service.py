"""The value service: the critic answers actors that keep no copy of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import AtollError, DataError, DeadlineExceeded
from atoll.ids import new_token
from atoll.queues import Item, Topic
from atoll.queues.serialization import encode, size
from atoll.rl.channel.latest import WAIT_S, Background
from atoll.rl.channel.messages import (
    ABOUT,
    decode_trajectory,
    encode_trajectory,
    metadata_of,
    with_metadata,
)
from atoll.rl.channel.names import QueueNames, QueueProvider
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Longest wait of an actor for one answer; then the trajectory is dropped."""

AGAIN_S = 0.25
ANSWERS_KEPT = 4
ASKS_KEPT = 1_024
ASK_BATCH = 64
ASK_LEASE_S = 60.0


class ServiceValues:
    """Asks the critic for the values of an actor's trajectories; not thread-safe."""

    def __init__(
        self,
        provider: QueueProvider,
        *,
        rl: RlTable,
        member: str,
        job: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Ask for `member`, and wait up to `timeout_s` for each answer."""
        names = QueueNames.of(rl, job=job)
        self._actor, self._timeout_s = names.actor(member), timeout_s
        # A request without an answer in time is worthless, so the oldest make room.
        self._asks = provider.queue(names.ask, **_asks_options())
        self._answers = provider.topic(names.answers(self._actor), max_items=ANSWERS_KEPT)
        self._subscription = self._answers.subscribe(self._actor, start="new")
        self.sent_bytes = 0
        self.received_bytes = 0
        self.waited_s: list[float] = []
        """Seconds that each of the last thousand answers took."""

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of a trajectory.

        Raises:
            DeadlineExceeded: the critic did not answer in time.
            DataError: the answer does not fit the trajectory.
        """
        began, why = time.monotonic(), "no answer arrived"
        deadline, message = began + self._timeout_s, encode_trajectory(trajectory)
        while time.monotonic() < deadline:
            found = self._ask(message, deadline)
            if found is None:
                continue
            about = metadata_of(found, "answer")
            if not about.get("refused"):
                self.waited_s = [*self.waited_s[-999:], time.monotonic() - began]
                return _valued(found, about, trajectory)
            why = str(about["refused"])  # the critic may not know this policy yet
            time.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))
        raise DeadlineExceeded(
            "the critic did not answer a request for values",
            given=f"{self._actor} waited {self._timeout_s:.0f} s: {why}",
            remedy="the actor skips this update; check that the critic runs: atoll status",
        )

    def _ask(self, message: Mapping[str, Tensor], deadline: float) -> Any:
        """Return the answer to one question, or None when the time is over."""
        number = new_token()
        ask = {**message, **_named(self._actor, number)}
        self.sent_bytes += size(encode(ask))
        self._asks.put(ask, key=number, timeout_s=self._timeout_s)
        while (left_s := deadline - time.monotonic()) > 0:
            for entry in self._subscription.read(ANSWERS_KEPT, wait_s=min(left_s, WAIT_S)):
                answer = entry.value
                self.received_bytes += size(encode(answer))
                if metadata_of(answer, "answer").get("ask") == number:
                    return answer
        return None


class ValueService:
    """Answers actors' requests at the critic, in a thread of its own.

    Args:
        provider: The run, or a queue registry.
        rl: The job's `[rl]`.
        of: Returns the values of a trajectory; called in that thread, so it MUST use a copy of
            the network that is not being trained.
        job: The job's name; only needed in a pool.
    """

    def __init__(
        self,
        provider: QueueProvider,
        *,
        rl: RlTable,
        of: Callable[[Trajectory], ValuedTrajectory],
        job: str = "",
    ) -> None:
        self._provider, self._names, self._of = provider, QueueNames.of(rl, job=job), of
        self._asks = provider.queue(self._names.ask, **_asks_options())
        self._topics: dict[str, Topic] = {}
        self.answered = 0
        self.refused = 0
        """Requests without an answer: damaged, or of an unknown policy."""
        self.sent_bytes = 0
        self.compute_s: list[float] = []
        """Computing time of each of the last thousand answers, in seconds."""
        self._thread = Background("answers of the critic", self._answer)

    def close(self) -> None:
        """Stop answering."""
        self._thread.close()

    def _answer(self) -> None:
        items = self._asks.claim(ASK_BATCH, lease_s=ASK_LEASE_S, wait_s=WAIT_S)
        for item in items:
            self._answer_one(item)
        if items:
            self._asks.ack(items)

    def _answer_one(self, item: Item) -> None:
        try:
            message = dict(item.value)
            who = metadata_of({ABOUT: message.pop("asks")}, "ask")
            actor, number = str(who["actor"]), str(who["ask"])
        except (AtollError, KeyError, TypeError, ValueError) as error:
            self.refused += 1
            log.warning("a request for values is malformed: %s", error)
            return
        answer = self._worth(message, number)
        if actor not in self._topics:
            self._topics[actor] = self._provider.topic(
                self._names.answers(actor), max_items=ANSWERS_KEPT
            )
        self.sent_bytes += size(encode(answer))
        self._topics[actor].publish_later(answer)

    def _worth(self, message: Mapping[str, Tensor], number: str) -> dict[str, Tensor]:
        """Return the answer to one request, or the reason why there is none."""
        began = time.monotonic()
        try:
            valued = self._of(decode_trajectory(message, None))
        except (AtollError, KeyError, RuntimeError) as error:
            self.refused += 1
            log.warning("values could not be computed: %s: %s", type(error).__name__, error)
            return with_metadata({}, "answer", ask=number, refused=str(error)[:500])
        self.compute_s = [*self.compute_s[-999:], time.monotonic() - began]
        self.answered += 1
        here = valued.to(torch.device("cpu"))
        tensors = {"values": here.values.float(), "cut_values": here.cut_values.float()}
        return with_metadata(tensors, "answer", ask=number, version=valued.version)


def _asks_options() -> dict[str, Any]:
    return {
        "max_items": ASKS_KEPT, "overflow": "drop-oldest", "keep_s": 2 * TIMEOUT_S,
        "max_attempts": 3,
    }  # fmt: skip


def _named(actor: str, number: str) -> dict[str, Tensor]:
    """Return the asking actor as one more tensor of a trajectory."""
    return {"asks": with_metadata({}, "ask", actor=actor, ask=number)["about"]}


def _valued(
    answer: Mapping[str, Tensor], about: Mapping[str, Any], trajectory: Trajectory
) -> ValuedTrajectory:
    values, cuts = answer.get("values"), answer.get("cut_values")
    length, columns = trajectory.rewards.shape
    expected = ((length + 1, columns), (len(trajectory.cut_at),))
    found = tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in (values, cuts))
    if values is None or cuts is None or found != expected:
        raise DataError(
            "the critic's answer does not fit", given=f"shapes {found}", expected=f"{expected}"
        )
    if not bool(torch.isfinite(values).all()):
        raise DataError("the critic's answer is not finite", given=trajectory.policy)
    return ValuedTrajectory(values=values, cut_values=cuts, version=int(about["version"]))
