"""The exchanges of one member with the members of a plan, in sequence, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from atoll.clock import RealClock
from atoll.errors import AtollError, PeerLost
from atoll.group.base import AllToAllResult, Reduced, Work
from atoll.group.routes.routes import Routes
from atoll.net.line_use import LineUse
from atoll.wire.messages import RoundPlan

EXTRA_S = 5.0
"""Longer wait than the plan's limit, so that the exchange's own, more specific error comes
first."""

T = TypeVar("T", Reduced, AllToAllResult)


class QueuedExchange(NamedTuple):
    """Identifies an exchange."""

    serial: int
    """Return value of :meth:`Routes.begin` for the plan."""
    phase: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One exchange of the current plan."""

    work: Work[Any]
    deadline: float
    needs: tuple[str, ...]
    """Members without which it cannot end."""


class ExchangeQueue:
    """See the module's docstring. Used from one thread, except the thread-safe :meth:`fail`."""

    def __init__(
        self,
        routes: Routes,
        *,
        me: str,
        is_lost: Callable[[RoundPlan, str], bool],
        trouble: Callable[[RoundPlan, BaseException], None],
        line: LineUse,
    ) -> None:
        """Create an empty queue, whose exchanges use the `line`.

        `is_lost` returns whether the hub reported a member of a plan as lost; `trouble` is called
        with an exchange's error, on its thread.
        """
        self._routes, self._me, self._is_lost, self._trouble = routes, me, is_lost, trouble
        self._line = line
        self.sent_bytes = 0
        self.received_bytes = 0
        self._lock = threading.Lock()  # `fail` reads the exchanges on other threads
        self._exchanges: list[_Exchange] = []
        self._serial = 0
        self._ended = threading.Event()
        self._ended.set()

    @property
    def idle(self) -> bool:
        """Whether the last exchange no longer uses its values."""
        return self._ended.is_set()

    def renew(self) -> None:
        """Restart the numbering for a new plan."""
        with self._lock:
            self._exchanges = []

    def begin(
        self, plan: RoundPlan, exchange: Callable[[QueuedExchange], T], *, all_to_all: bool
    ) -> Work[T]:
        """Start one exchange on a thread; it waits for the previous one."""
        self._routes.upload_s = None
        before = self._exchanges[-1] if self._exchanges else None
        if before is None:
            self._serial = self._routes.begin()
        now = RealClock().monotonic()
        since = now if before is None or before.work.done() else before.deadline
        deadline = since + plan.timeout_s + EXTRA_S
        turn, ended = QueuedExchange(self._serial, len(self._exchanges)), threading.Event()
        needs = tuple(self._routes.needed(plan, all_to_all=all_to_all))
        work: Work[T] = Work(deadline=deadline)
        with self._lock:
            self._exchanges.append(_Exchange(work, deadline, needs))
            self._ended = ended

        def body() -> None:
            try:
                if before is not None:
                    before.work.wait()
                with self._line.exchange():
                    out = exchange(turn)
                self.sent_bytes += out.sent_bytes
                self.received_bytes += out.received_bytes
                work.finish(out)
            except BaseException as error:  # any error is raised by `wait`
                work.fail(error)
                self._trouble(plan, error)
            finally:
                ended.set()

        threading.Thread(target=body, name=f"reduce-{self._me}", daemon=True).start()
        if any(self._is_lost(plan, member) for member in needs):
            work.fail(PeerLost("a member was lost before the exchange began"))
        return work

    def fail(self, error: AtollError, *, needed: str = "") -> None:
        """Fail the pending exchanges, or only those that need the member `needed`."""
        with self._lock:
            exchanges = list(self._exchanges)
        for exchange in exchanges:
            if not needed or needed in exchange.needs:
                exchange.work.fail(error)
