"""The newest item of a topic, read in the background and written in the background.

Threads that do one thing again and again beside a loop that must not wait for it.
"""

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
"""After a question that was answered by an error."""


class Background:
    """Calls `work` until it is closed; an error of the hub is told once and tried again."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """Begin at once; `work` MUST return within about a second, and not spin."""
        self._name, self._work = name, work
        self._end = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it was told to end."""
        return self._end.is_set()

    def end(self) -> None:
        """Let it end after what it does just now."""
        self._end.set()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Let it end, and wait for that a little."""
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
"""One question to the hub waits so long, so that the end of a thread is not far."""


LONGEST_INTERVAL_S = 10.0
"""Whoever takes more rarely than this gets what was published half of this before at most."""


class LatestValue:
    """Keeps the newest item of a topic; asking for it never waits."""

    def __init__(
        self,
        topic: Topic,
        *,
        reader: str,
        on_news: Callable[[Any], None] = lambda value: None,
        sparing: bool = False,
    ) -> None:
        """Subscribe; `begin` begins to read.

        Args:
            topic: Where to read.
            reader: Name of the subscription.
            on_news: Called in the background with each item that was the newest when it came.
            sparing: Fetch one item for each `take` only, about half way to the next one, instead
                of everything that is published.
        """
        self._topic, self._reader, self._on_news = topic, reader, on_news
        self._subscription = topic.subscribe(reader, start="oldest")
        self._lock = threading.Condition()
        self._sparing = sparing
        self._looked_at, self._interval_s = -1.0, 0.0
        self._value: Any = None
        self._fresh = False
        self.heard_at = -1.0
        """Monotonic time of the last item; below 0: there was none."""
        self.received_bytes = 0
        self._thread: Background | None = None

    def begin(self) -> LatestValue:
        """Begin to read; return itself."""
        self._thread = Background(f"reader of {self._topic.name}", self._read)
        return self

    def take(self) -> Any:
        """Return the newest item if it was not taken before, else None."""
        with self._lock:
            now = time.monotonic()
            if self._looked_at >= 0:
                self._interval_s = min(now - self._looked_at, LONGEST_INTERVAL_S)
            self._looked_at = now
            fresh, self._fresh = self._fresh, False
            self._lock.notify_all()
            return self._value if fresh else None

    def end(self) -> None:
        """Stop reading after the question that is under way."""
        if self._thread is not None:
            self._thread.end()
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """Stop reading, and wait for that a little."""
        if self._thread is not None:
            self._thread.close()

    def _is_due(self) -> bool:
        """Return whether to fetch now; waits a little if not."""
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
            self.heard_at = time.monotonic()
            self.received_bytes += nbytes
        self._on_news(value)


class Publisher:
    """Publishes in the background; what was not sent yet when something newer comes never is."""

    def __init__(self, topic: Topic) -> None:
        """Publish into `topic`."""
        self._topic = topic
        self._condition = threading.Condition()
        self._waiting: tuple[Any, Callable[[], None]] | None = None
        self._busy = False
        self.sent_bytes = 0
        self.published = 0
        self._thread = Background(f"publisher of {topic.name}", self._send)

    def put(self, value: Any, *, then: Callable[[], None] = lambda: None) -> None:
        """Hand on a value, which MUST NOT change any more.

        Args:
            value: What `run.topic` takes.
            then: Called in the background once it is durable; not called if a newer one came first.
        """
        with self._condition:
            self._waiting = (value, then)
            self._condition.notify_all()

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until all is durable; return whether that was in time."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._waiting is not None or self._busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Send what waits, and stop; return whether all of it is durable."""
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
            with self._condition:  # nothing newer came: it is tried again
                self._waiting = self._waiting or (value, then)
            raise
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
