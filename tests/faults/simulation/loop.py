"""An event loop on virtual time, so that the hub's own coroutines run unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.simulate.scheduler import Process, Scheduler


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks of one process; it ends with its process, wherever it stands."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler, self._process = scheduler, process
        self._ready: deque[asyncio.Handle] = deque()
        self._pumping = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.errors: list[dict[str, Any]] = []

    def drop(self) -> None:
        """Forget everything: the process was killed."""
        self._ready.clear()
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            if coroutine is not None and not coroutine.cr_running:
                # What the hub does while it unwinds is done by nobody: it is dead.
                with contextlib.suppress(Exception):
                    coroutine.close()

    # ------------------------------------------------------------------- what asyncio asks

    def time(self) -> float:
        return self._scheduler.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self._process.alive

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self._process.alive:
            self._ready.append(handle)
            if not self._pumping:
                self._pumping = True
                self._scheduler.at(self._scheduler.now, self._pump, self._process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def due() -> None:
            if not handle.cancelled():
                self.call_soon(handle._run)

        self._scheduler.at(when, due, self._process)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer goes off and finds itself cancelled."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call it at once: a thread of its own would be none of the schedule's."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.alive:
            self.errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    # ------------------------------------------------------------------------------ running

    def _pump(self) -> None:
        self._pumping = False
        self.run_ready()

    def run_ready(self) -> None:
        """Run what is ready, and what becomes so meanwhile; a stopped process stops at once."""
        process, ready = self._process, self._ready
        asyncio._set_running_loop(self)
        try:
            while ready and process.running:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        if ready and process.alive and not self._pumping:
            self._pumping = True
            self._scheduler.at(self._scheduler.now, self._pump, process)
