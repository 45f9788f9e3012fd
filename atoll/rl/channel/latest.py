"""The newest item of a topic, read and published by background threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from atoll.errors import AtollError
from atoll.queues import Topic
from atoll.queues.serialization import encode, size

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Pause after a request that failed."""


class Background:
    """A thread that repeats `work` until closed; hub errors are logged once and retried."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """Start at once; `work` MUST return within about a second, and not spin."""
        self._name, self._work = name, work
        self._end = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the thread was asked to end."""
        return self._end.is_set()

    def end(self) -> None:
        """End after the current call of `work`."""
        self._end.set()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """End, and wait up to `timeout_s`."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._work()
                self._failing = False
            except AtollError as error:
                if not self._failing and not self._end.is_set():
                    log.warning("%s: %s; it is tried again", self._name, error)
                self._failing = True
                self._end.wait(PAUSE_S)
            except Exception:
                log.exception("%s has failed and is tried again", self._name)
                self._end.wait(PAUSE_S)


WAIT_S = 0.5
"""Long poll of one hub request: short, so that a thread ends soon after it is asked to."""


LONGEST_INTERVAL_S = 10.0
"""With longer intervals between two `take`, a value is at most half of this old."""


class LatestValue:
    """Keeps the newest item of a topic; `take` never waits."""

    def __init__(
        self,
        topic: Topic,
        *,
        reader: str,
        on_news: Callable[[Any], None] = lambda value: None,
        sparing: bool = False,
    ) -> None:
        """Subscribe; `begin` starts to read.

        Args:
            topic: The topic to read.
            reader: Name of the subscription.
            on_news: Called in the background with each item that was the newest when it arrived.
            sparing: Fetch one item per `take`, about half way to the next one, instead of all.
        """
        self._topic, self._reader, self._on_news = topic, reader, on_news
        self._subscription = topic.subscribe(reader, start="oldest")
        self._lock = threading.Condition()
        self._sparing = sparing
        self._looked_at, self._interval_s = -1.0, 0.0
        self._value: Any = None
        self._fresh = False
        self.received_at = -1.0
        """Monotonic time of the last item; below 0: there was none."""
        self.received_bytes = 0
        self._thread: Background | None = None

    def begin(self) -> LatestValue:
        """Start to read; return itself."""
        self._thread = Background(f"reader of {self._topic.name}", self._read)
        return self

    def take(self) -> Any:
        """Return the newest item, or None if it was returned before."""
        with self._lock:
            now = time.monotonic()
            if self._looked_at >= 0:
                self._interval_s = min(now - self._looked_at, LONGEST_INTERVAL_S)
            self._looked_at = now
            fresh, self._fresh = self._fresh, False
            self._lock.notify_all()
            return self._value if fresh else None

    def end(self) -> None:
        """Stop reading after the current request."""
        if self._thread is not None:
            self._thread.end()
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """Stop reading, and wait for that briefly."""
        if self._thread is not None:
            self._thread.close()

    def _is_due(self) -> bool:
        """Return whether to fetch now; if not, wait briefly."""
        with self._lock:
            if not self._sparing or (self._looked_at < 0 and not self._fresh):
                return True
            if self._fresh:
                self._lock.wait(WAIT_S)
                return False
            left_s = self._looked_at + self._interval_s / 2 - time.monotonic()
            if left_s > 0:
                self._lock.wait(min(left_s, WAIT_S))
            return left_s <= 0

    def _read(self) -> None:
        if not self._is_due():
            return
        entry = self._subscription.newest(wait_s=WAIT_S)
        if entry is None:
            return
        value = entry.value
        nbytes = size(encode(value))
        with self._lock:
            self._value, self._fresh = value, True
            self.received_at = time.monotonic()
            self.received_bytes += nbytes
        self._on_news(value)


class Publisher:
    """Publishes in the background; an unsent value is replaced by a newer one."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._condition = threading.Condition()
        self._waiting: tuple[Any, Callable[[], None]] | None = None
        self._busy = False
        self.sent_bytes = 0
        self.published = 0
        self._thread = Background(f"publisher of {topic.name}", self._send)

    def put(self, value: Any, *, then: Callable[[], None] = lambda: None) -> None:
        """Publish a value, which MUST NOT change any more.

        `then` runs in the background once it is durable, unless a newer value replaced it.
        """
        with self._condition:
            self._waiting = (value, then)
            self._condition.notify_all()

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until all is durable; return whether it was in time."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._waiting is not None or self._busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Send what is pending, and stop; return whether all of it is durable."""
        done = self.flush(timeout_s=timeout_s)
        self._thread.end()
        with self._condition:
            self._condition.notify_all()
        self._thread.close()
        return done

    def _send(self) -> None:
        with self._condition:
            if self._waiting is None:
                self._condition.wait(WAIT_S)
            if self._waiting is None:
                return
            (value, then), self._waiting, self._busy = self._waiting, None, True
        try:
            self._topic.publish(value)
            self.sent_bytes += size(encode(value))
            self.published += 1
            then()
        except BaseException:
            with self._condition:  # retry, unless a newer value has arrived
                self._waiting = self._waiting or (value, then)
            raise
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
