"""Blocking code on virtual time: exactly one fiber runs, and it runs until it waits.

The code of members is written for threads. Here each thread is a fiber that gives the baton back
to the scheduler whenever it would block. Fibers are greenlets where they are installed (they come
with playwright) and otherwise threads of which all but one wait.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any, Protocol

from atoll.simulate.scheduler import Alarm, Process, Scheduler

greenlets: Any
try:
    greenlets = importlib.import_module("greenlet")
except ImportError:  # pragma: no cover - depends on what else is installed
    greenlets = None


class Killed(BaseException):
    """Unwinds the fibers of a process that was killed."""


class Strand(Protocol):
    """A piece of code that can be left in the middle."""

    def enter(self) -> None:
        """Run it on from where it left, until it leaves or ends."""
        ...

    def leave(self) -> None:
        """Called inside: give the baton back until entered again."""
        ...


class GreenStrand:
    """A strand that is a greenlet."""

    def __init__(self, body: Callable[[], None], home: Any) -> None:
        self._home = home
        self._own = greenlets.greenlet(body, parent=home)

    def enter(self) -> None:
        self._own.switch()

    def leave(self) -> None:
        self._home.switch()


class ThreadStrand:
    """A strand that is a thread, awake only between `enter` and `leave`."""

    def __init__(self, body: Callable[[], None], home: Any) -> None:
        self._inside, self._outside = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = False

    def _run(self) -> None:
        self._inside.acquire()
        try:
            self._body()
        finally:
            self._outside.release()

    def enter(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._inside.release()
        self._outside.acquire()

    def leave(self) -> None:
        self._outside.release()
        self._inside.acquire()


class Fiber:
    """One thread of a simulated process."""

    def __init__(
        self, fibers: Fibers, process: Process, function: Callable[[], Any], name: str
    ) -> None:
        self.name, self.process = name, process
        self.done = False
        self.waking: Alarm | None = None
        self.timed_out = False
        self._fibers, self._function = fibers, function
        make = GreenStrand if greenlets is not None else ThreadStrand
        self._strand: Strand = make(self._body, fibers.home)

    def _body(self) -> None:
        try:
            if self.process.alive:
                self._function()
        except Killed:
            pass
        except BaseException as error:
            self._fibers.failed(self, error)
        finally:
            self.done = True
            self._fibers.ended(self)

    def enter(self) -> None:
        """Run it until it waits; called by the scheduler."""
        if self.done:
            return
        before, self._fibers.current = self._fibers.current, self
        try:
            self._strand.enter()
        finally:
            self._fibers.current = before

    def leave(self) -> None:
        """Wait until entered again; called inside."""
        self._strand.leave()
        if not self.process.alive:
            raise Killed


class Fibers:
    """All fibers of a world."""

    def __init__(
        self, scheduler: Scheduler, failed: Callable[[Fiber, BaseException], None]
    ) -> None:
        self.scheduler = scheduler
        self.current: Fiber | None = None
        self.failed = failed
        self.home: Any = None if greenlets is None else greenlets.getcurrent()
        """Where the scheduler runs; every fiber gives the baton back to it."""
        self._of: dict[Process, dict[Fiber, None]] = {}
        # Not sets: their order would be that of addresses, another one in every run.

    def start(self, process: Process, function: Callable[[], Any], name: str) -> Fiber:
        fiber = Fiber(self, process, function, name)
        self._of.setdefault(process, {})[fiber] = None
        self.scheduler.at(self.scheduler.now, fiber.enter, process)
        return fiber

    def ended(self, fiber: Fiber) -> None:
        self._of.get(fiber.process, {}).pop(fiber, None)

    def reap(self, process: Process) -> None:
        """Unwind the fibers of a dead process; the one that runs at the moment does so itself."""
        for fiber in list(self._of.pop(process, ())):
            if fiber is self.current:
                continue
            if self.current is None:
                fiber.enter()
            else:
                self.scheduler.at(self.scheduler.now, fiber.enter)

    def me(self) -> Fiber:
        """Return the running fiber; only fibers may block."""
        if self.current is None:
            raise RuntimeError("something blocks outside of a fiber")
        return self.current

    def park(self, timeout_s: float | None) -> bool:
        """Wait until woken, at most so long; return whether it was woken."""
        fiber = self.me()
        if not fiber.process.alive:
            raise Killed
        alarm = None
        fiber.timed_out = False
        if timeout_s is not None:

            def late() -> None:
                fiber.timed_out = True
                fiber.enter()

            alarm = self.scheduler.after(max(0.0, timeout_s), late, fiber.process)
        fiber.waking = None
        try:
            fiber.leave()
        finally:
            if alarm is not None:
                alarm.cancel()
            if fiber.waking is not None:
                fiber.waking.cancel()
                fiber.waking = None
        return not fiber.timed_out

    def wake(self, fiber: Fiber) -> None:
        """Let a parked fiber go on as soon as it is its turn."""
        if fiber.waking is None and not fiber.done:
            fiber.waking = self.scheduler.at(self.scheduler.now, fiber.enter, fiber.process)

    def sleep(self, seconds: float) -> None:
        """Do nothing for a while; nobody wakes a sleeper."""
        deadline = self.scheduler.now + seconds
        while (left_s := deadline - self.scheduler.now) > 0:
            self.park(left_s)

    def here(self) -> None:
        """Stop here if the process was stopped or killed by what just happened."""
        fiber = self.current
        if fiber is None:
            return
        if not fiber.process.alive:
            raise Killed
        if fiber.process.stopped:
            self.wake(fiber)
            fiber.leave()


class Parking:
    """Fibers that wait for one thing."""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._waiting: list[Fiber] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        fiber = self._fibers.me()
        self._waiting.append(fiber)
        try:
            return self._fibers.park(timeout_s)
        finally:
            if fiber in self._waiting:
                self._waiting.remove(fiber)

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            self._fibers.wake(fiber)


class SimulatedFuture:
    """Stands in for `concurrent.futures.Future`."""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._parking = Parking(fibers)
        self._state = "pending"
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self._state != "pending"

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def running(self) -> bool:
        return False

    def cancel(self) -> bool:
        if self._state == "pending":
            self._end("cancelled")
        return self._state == "cancelled"

    def set_result(self, value: Any) -> None:
        if self.done():
            raise InvalidStateError
        self._value = value
        self._end("done")

    def set_exception(self, error: BaseException | None) -> None:
        if self.done():
            raise InvalidStateError
        self._error = error
        self._end("done")

    def offer(self, value: Any, error: BaseException | None = None) -> None:
        """End with a value or an error, unless it has ended."""
        if not self.done():
            self._value, self._error = value, error
            self._end("done")

    def _end(self, state: str) -> None:
        self._state = state
        self._parking.wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def _wait(self, timeout: float | None) -> None:
        now = self._fibers.scheduler.monotonic
        deadline = None if timeout is None else now() + timeout
        while not self.done():
            left_s = None if deadline is None else deadline - now()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._parking.wait(left_s)
        if self._state == "cancelled":
            raise CancelledError
