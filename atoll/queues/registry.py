"""The queues and topics of one run: names, one object per name, and a common close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.clock import Clock, RealClock
from atoll.errors import ConfigError, unknown
from atoll.queues.channel import Channel
from atoll.queues.queue import Queue
from atoll.queues.topic import Topic
from atoll.wire.messages import QueueOptions


class QueueRegistry:
    """Returns queues and topics; the same name gives the same object.

    Args:
        channel: How they are reached.
        prefix: Prefix of names without a slash: the job.
        reader: Default name of subscriptions: the member.
        clock: Source of time for deadlines.
        stopping: Whether the run was asked to stop.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        prefix: str,
        reader: str,
        clock: Clock | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._channel = channel
        self._prefix = prefix
        self._reader = reader
        self._clock: Clock = clock or RealClock()
        self._stopping = stopping
        self._queues: dict[str, Queue] = {}
        self._topics: dict[str, Topic] = {}

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a queue; `options` are those of `QueueOptions`, set if any is given."""
        wanted = options_of(options)
        if name not in self._queues:
            self._queues[name] = Queue(
                self._full(name), self._channel, clock=self._clock,
                options=wanted, stopping=self._stopping,
            )  # fmt: skip
        elif wanted is not None:
            self._queues[name].set_options(wanted)
        return self._queues[name]

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic; `options` as in `queue`."""
        wanted = options_of(options)
        if name not in self._topics:
            self._topics[name] = Topic(
                self._full(name), self._channel, clock=self._clock, reader=self._reader,
                options=wanted, stopping=self._stopping,
            )  # fmt: skip
        elif wanted is not None:
            self._topics[name].set_options(wanted)
        return self._topics[name]

    def close(self, *, timeout_s: float) -> bool:
        """Wait for pending puts, then close; return whether all were acknowledged."""
        deadline = self._clock.monotonic() + timeout_s
        lines: list[Queue | Topic] = [*self._queues.values(), *self._topics.values()]
        done = [line.flush(timeout_s=deadline - self._clock.monotonic()) for line in lines]
        self._channel.close()
        return all(done)

    def _full(self, name: str) -> str:
        if not name or name.startswith("/"):
            raise ConfigError(
                "this cannot be the name of a queue", given=repr(name), expected="e.g. experience"
            )
        return name if "/" in name else f"{self._prefix}/{name}"


def options_of(options: dict[str, Any]) -> QueueOptions | None:
    """Return options by name, or None if there are none.

    Raises:
        ConfigError: there is no such option, or it has another type.
    """
    if not options:
        return None
    for name in options:
        if name not in QueueOptions.__struct_fields__:
            raise unknown("option of a queue", name, QueueOptions.__struct_fields__)
    try:
        return msgspec.convert(options, QueueOptions)
    except msgspec.ValidationError as error:
        raise ConfigError("an option of a queue is wrong", given=str(error)) from error
