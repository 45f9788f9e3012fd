"""Ctrl+C as a flag instead of an exception, so that it cannot interrupt clean-up."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from atoll.system import INTERRUPTS

P = ParamSpec("P")
T = TypeVar("T")


LONGEST_WAIT_S = 0.5


class RememberedInterrupt:
    """While open, SIGINT raises as usual and is also remembered.

    Modules imported at start may swallow the exception; :class:`Interrupts` then still knows about
    it.
    """

    def __init__(self) -> None:
        self.seen = False
        self._installed = False

    def __enter__(self) -> RememberedInterrupt:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; if modules are being imported, after their import.

        An exception during the import of compiled modules, such as torch's, would end the process.
        """
        self.seen = True
        if not _is_importing(frame):
            raise KeyboardInterrupt
        again = threading.Timer(0.05, self._repeat, (number,))
        again.daemon = True
        again.start()

    def _repeat(self, number: int) -> None:
        if signal.getsignal(number) is self:  # else another handler has taken over
            _thread.interrupt_main(signal.Signals(number))


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in a frame or what has called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def remembering_interrupts(verb: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that it remembers Ctrl+C from its start."""

    @functools.wraps(verb)
    def remembering(*args: P.args, **options: P.kwargs) -> T:
        with RememberedInterrupt():
            return verb(*args, **options)

    return remembering


class Interrupts:
    """While open, SIGINT and SIGTERM set a flag that every wait checks.

    Must be opened in the main thread (only there Python runs signal handlers).
    """

    def __init__(self, *, on_first: Callable[[], None] = lambda: None) -> None:
        """`on_first` is called once, inside the handler of the first signal; it must not block."""
        self._on_first = on_first
        # The handler runs between any two steps of the main thread, in the midst of a wait too: an
        # Event's lock would be taken twice then, and the command would hang.
        self._changed = threading.Condition(threading.RLock())
        self._old: dict[int, Any] = {}
        self.count = 0
        """Signals so far: a second one means "at once"."""

    def __enter__(self) -> Interrupts:
        for number in INTERRUPTS:
            self._old[number] = signal.signal(number, self._handle)
        before = self._old[signal.SIGINT]
        if isinstance(before, RememberedInterrupt) and before.seen:
            self._handle(signal.SIGINT, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.count > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        with self._changed:
            self._changed.notify_all()
        if self.count == 1:
            self._on_first()

    def sleep(self, seconds: float) -> bool:
        """Wait that long, or less when a signal comes; return whether one came."""
        deadline = time.monotonic() + seconds
        with self._changed:
            # A signal just before a wait does not end it, so none is long.
            while not self and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, LONGEST_WAIT_S))
        return bool(self)

    def until(self, condition: Callable[[], bool], *, timeout_s: float, every_s: float) -> bool:
        """Wait until the condition holds, a signal comes or time is up; return the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self or time.monotonic() >= deadline:
                return condition()
            self.sleep(every_s)
        return True
