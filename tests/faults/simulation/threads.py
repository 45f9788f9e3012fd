"""Stand-ins for what the modules under test take from `threading` and `concurrent.futures`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tests.faults.simulation.fibers import Fiber, Fibers, Parking, SimulatedFuture


class Lock:
    """A lock between fibers; `re` may take it again."""

    def __init__(self, fibers: Fibers, *, re: bool = False) -> None:
        self._fibers, self._re = fibers, re
        self._parking = Parking(fibers)
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me: object = self._fibers.current or self._fibers
        while self._depth and not (self._re and self._owner is me):
            if not blocking:
                return False
            if not self._parking.wait(None if timeout < 0 else timeout) and timeout >= 0:
                return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._parking.wake()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Condition:
    """A condition between fibers."""

    def __init__(self, fibers: Fibers, lock: Lock | None = None) -> None:
        self._fibers = fibers
        self._lock = lock if lock is not None else Lock(fibers, re=True)
        self._parking = Parking(fibers)
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._parking.wait(timeout)
        finally:
            if self._fibers.me().process.alive:
                self._lock.acquire()
            else:
                self._lock._depth += 1  # unwinding: nobody else of this process runs any more

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        now = self._fibers.scheduler.monotonic
        deadline = None if timeout is None else now() + timeout
        while not (found := predicate()):
            left_s = None if deadline is None else deadline - now()
            if left_s is not None and left_s <= 0:
                return found
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        self._parking.wake()  # waking more than asked for is allowed: waiters look again

    def notify_all(self) -> None:
        self._parking.wake()


class Event:
    """An event between fibers."""

    def __init__(self, fibers: Fibers) -> None:
        self._parking = Parking(fibers)
        self._now = fibers.scheduler.monotonic
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._parking.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._now() + timeout
        while not self._set:
            left_s = None if deadline is None else deadline - self._now()
            if left_s is not None and left_s <= 0:
                break
            self._parking.wait(left_s)
        return self._set


class Thread:
    """A thread that is a fiber of the process that starts it."""

    def __init__(
        self,
        fibers: Fibers,
        group: None = None,
        target: Callable[..., Any] = print,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool = True,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._fibers = fibers
        self._call: Callable[[], Any] = partial(target, *args, **(kwargs or {}))
        self._fiber: Fiber | None = None
        self._ended = Event(fibers)

    def start(self) -> None:
        process = self._fibers.me().process
        self._fiber = self._fibers.start(process, self._run, self.name)

    def _run(self) -> None:
        try:
            self._call()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.done

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Threading:
    """Stands in for the module `threading`."""

    def __init__(self, fibers: Fibers) -> None:
        self.Thread = lambda *a, **k: Thread(fibers, *a, **k)
        self.Lock = lambda: Lock(fibers)
        self.RLock = lambda: Lock(fibers, re=True)
        self.Condition = lambda lock=None: Condition(fibers, lock)
        self.Event = lambda: Event(fibers)
        self.current_thread = threading.current_thread
        self.main_thread = threading.main_thread
        self.get_ident = threading.get_ident


class Executor:
    """Stands in for `ThreadPoolExecutor` with one worker: jobs run in order, on a fiber."""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._jobs: list[tuple[SimulatedFuture, Callable[[], Any]]] = []
        self._busy = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SimulatedFuture:
        future = SimulatedFuture(self._fibers)
        self._jobs.append((future, lambda: function(*args, **kwargs)))
        if not self._busy:
            self._busy = True
            self._fibers.start(self._fibers.me().process, self._run, "executor")
        return future

    def _run(self) -> None:
        while self._jobs:
            future, call = self._jobs.pop(0)
            if future.cancelled():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        self._busy = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._jobs.clear()
