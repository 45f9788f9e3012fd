"""A lock that lets other threads read a state while the training thread does not change it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.clock import RealClock
from atoll.errors import DeadlineExceeded


class StateLock:
    """One thread changes the state, any number of others read it in between.

    Waiting readers go first at the next rest, so that a loop that steps without a pause cannot
    starve them. The training thread waits only while they copy.
    """

    def __init__(self) -> None:
        """Start at rest."""
        self._condition = threading.Condition()
        self._moving = False
        self._readers = 0
        self._waiting = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Change the state inside; one thread at a time, not nested."""
        self._move()
        try:
            yield
        finally:
            self._rest()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Pause a change, e.g. to wait for others: the state does not change inside.

        Does nothing outside of `moving`.
        """
        if not self._moving:
            yield
            return
        self._rest()
        try:
            yield
        finally:
            self._move()

    @contextmanager
    def still(self, *, timeout_s: float) -> Iterator[None]:
        """Read the state inside, from another thread than the one that changes it.

        Raises:
            DeadlineExceeded: the state was being changed all the time.
        """
        deadline = RealClock().monotonic() + timeout_s
        with self._condition:
            self._waiting += 1
            try:
                while self._moving:
                    left_s = deadline - RealClock().monotonic()
                    if left_s <= 0 or not self._condition.wait(left_s):
                        if not self._moving:
                            break
                        raise DeadlineExceeded(
                            "the state did not come to rest in time", given=f"{timeout_s:.1f} s"
                        )
                self._readers += 1
            finally:
                self._waiting -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    def _move(self) -> None:
        with self._condition:
            while self._readers or self._waiting:
                self._condition.wait()
            self._moving = True

    def _rest(self) -> None:
        with self._condition:
            self._moving = False
            self._condition.notify_all()
