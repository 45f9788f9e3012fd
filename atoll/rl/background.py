"""Threads that do one thing again and again beside a loop that must not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from atoll.errors import AtollError

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
