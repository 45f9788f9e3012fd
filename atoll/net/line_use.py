"""Uploads in the background give way to what other members wait for.

A trainer writes into a small file until when it uses its line: during exchanges, and while it sends
its state to a newcomer. The process that uploads its checkpoints reads the file before each block.
All processes of a machine have the same monotonic clock.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

EXCHANGE_S = 60.0
"""An exchange that takes longer no longer holds up uploads."""

SHARE = 0.75
"""Largest share of its time for which an upload waits, so that checkpoints are uploaded even if
members exchange all the time."""

FIRST_S = 5.0
"""An upload may wait this long in any case."""

LOOK_S = 0.02

_NUMBER = struct.Struct("!d")


class LineUse:
    """Records until when this process uses its line. Thread-safe; inactive without a path."""

    def __init__(
        self, path: Path | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._exchanges, self._until = 0, 0.0
        if path is not None:
            with contextlib.suppress(OSError):  # then uploads do not give way
                self._file = path.open("wb", buffering=0)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Use the line inside the block."""
        with self._lock:
            self._exchanges += 1
            self._say(self._monotonic() + EXCHANGE_S)
        try:
            yield
        finally:
            with self._lock:
                self._exchanges -= 1
                if not self._exchanges:
                    self._say(self._until)

    def serve(self, seconds: float) -> None:
        """Use the line for so long."""
        with self._lock:
            self._until = max(self._until, self._monotonic() + seconds)
            if not self._exchanges:
                self._say(self._until)

    def close(self) -> None:
        """Close the file; uploads go on."""
        with self._lock:
            self._say(0.0)
            if self._file is not None:
                self._file.close()
                self._file = None

    def _say(self, until: float) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: uploads do not give way
                self._file.seek(0)
                self._file.write(_NUMBER.pack(until))


class GiveWay:
    """Waits while a trainer uses the line, by the file of its `LineUse`; for one upload."""

    def __init__(
        self,
        path: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file at `path`; without a path, or without the file, never wait."""
        self._path, self._sleep, self._monotonic = path, sleep, monotonic
        self._began, self._waited_s = monotonic(), 0.0

    def wait(self) -> None:
        """Wait while the line is used, within `SHARE`."""
        while (left_s := self._left_s()) > 0:
            allowed_s = FIRST_S + SHARE * (self._monotonic() - self._began)
            if self._waited_s >= allowed_s:
                return
            before = self._monotonic()
            self._sleep(min(left_s, LOOK_S))
            self._waited_s += self._monotonic() - before  # a busy machine sleeps longer

    def _left_s(self) -> float:
        if not self._path:
            return 0.0
        try:
            with open(self._path, "rb") as file:
                (until,) = _NUMBER.unpack(file.read(_NUMBER.size))
        except (OSError, struct.error):
            return 0.0
        return min(EXCHANGE_S, float(until) - self._monotonic())
