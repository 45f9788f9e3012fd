"""The exchanges of one member with the members of a plan: one after the other, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from atoll.clock import RealClock
from atoll.errors import AtollError, PeerLost
from atoll.group.base import AllToAllResult, Reduced, Work
from atoll.group.routes.routes import Routes
from atoll.wire.messages import RoundPlan

EXTRA_S = 5.0
"""How much longer than the plan's time an exchange is waited for: its own error says more."""

T = TypeVar("T", Reduced, AllToAllResult)


class QueuedExchange(NamedTuple):
    """Which exchange it is."""

    serial: int
    """What :meth:`Routes.begin` returned for the plan."""
    phase: int
    """Its number within the plan."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One exchange of the present plan, done or under way."""

    work: Work[Any]
    deadline: float
    needs: tuple[str, ...]
    """Members without whom it cannot end."""


class ExchangeQueue:
    """See the module's docstring. Begun from one thread; :meth:`fail` may come from any."""

    def __init__(
        self,
        routes: Routes,
        *,
        me: str,
        is_lost: Callable[[RoundPlan, str], bool],
        trouble: Callable[[RoundPlan, BaseException], None],
    ) -> None:
        """Have nothing under way.

        Args:
            routes: How members meet.
            me: Own member id, for the names of threads.
            is_lost: Whether the hub said that it lost a member of a plan.
            trouble: Told what ended an exchange; on its thread.
        """
        self._routes, self._me, self._is_lost, self._trouble = routes, me, is_lost, trouble
        self.sent_bytes = 0
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._exchanges: list[_Exchange] = []
        self._serial = 0
        self._ended = threading.Event()
        self._ended.set()

    @property
    def idle(self) -> bool:
        """Whether the last exchange that was begun uses its values no more."""
        return self._ended.is_set()

    def renew(self) -> None:
        """Count from 0: there is another plan."""
        with self._lock:
            self._exchanges = []

    def begin(
        self, plan: RoundPlan, exchange: Callable[[QueuedExchange], T], *, swaps: bool
    ) -> Work[T]:
        """Begin one exchange on a thread; it waits for the one before it.

        Args:
            plan: Who takes part.
            exchange: Does it.
            swaps: Whether it is a swap.
        """
        self._routes.upload_s = None
        before = self._exchanges[-1] if self._exchanges else None
        if before is None:
            self._serial = self._routes.begin()
        now = RealClock().monotonic()
        since = now if before is None or before.work.done() else before.deadline
        deadline = since + plan.timeout_s + EXTRA_S
        turn, ended = QueuedExchange(self._serial, len(self._exchanges)), threading.Event()
        needs = tuple(self._routes.needed(plan, swaps=swaps))
        work: Work[T] = Work(deadline=deadline)
        with self._lock:
            self._exchanges.append(_Exchange(work, deadline, needs))
            self._ended = ended

        def body() -> None:
            try:
                if before is not None:
                    before.work.wait()
                out = exchange(turn)
                self.sent_bytes += out.sent_bytes
                self.received_bytes += out.received_bytes
                work.finish(out)
            except BaseException as error:  # whatever it is belongs to the one who waits
                work.fail(error)
                self._trouble(plan, error)
            finally:
                ended.set()

        threading.Thread(target=body, name=f"reduce-{self._me}", daemon=True).start()
        if any(self._is_lost(plan, member) for member in needs):
            work.fail(PeerLost("a member was lost before the exchange began"))
        return work

    def fail(self, error: AtollError, *, needed: str = "") -> None:
        """End the exchanges under way; if a member is named only those that need it."""
        with self._lock:
            exchanges = list(self._exchanges)
        for exchange in exchanges:
            if not needed or needed in exchange.needs:
                exchange.work.fail(error)
