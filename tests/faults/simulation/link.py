"""Stands in for `SyncLink`: one session of a simulated process with the hub of the moment.

It keeps the promises of the real link: requests are sent again after a reconnect under the same
id, relayed frames that were in a broken connection are lost, a session that was replaced ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, AuthError, DeadlineExceeded, HubError, PeerLost, from_dict
from atoll.net.dispatcher import Reconnected, Relayed
from atoll.net.transport import LinkCounters
from atoll.simulate.scheduler import Process
from atoll.wire.messages import Failure, Message, NodeInfo, Undeliverable
from tests.faults.simulation.fibers import Parking, SimulatedFuture
from tests.faults.simulation.network import ACCEPT_TIMEOUT_S, DEAD_AFTER_S, UP, Connection, Line

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
FINAL = frozenset({1008, 4000})
"""Codes of the hub after which a link does not come back."""


class SimulatedInbox:
    """Stands in for `Inbox`."""

    def __init__(
        self,
        link: SimulatedLink,
        sources: Collection[str] | None,
        notices: tuple[type[Message], ...],
        reconnects: bool,
        prefix: bytes,
    ) -> None:
        self.sources, self.notices, self.reconnects = sources, notices, reconnects
        self.prefix = prefix
        self._link = link
        self._arrivals: deque[Any] = deque()
        self._parking = Parking(link.world.fibers)
        self._closed = False

    def put(self, item: Any) -> None:
        if isinstance(item, Relayed):
            wanted = self.sources is None or item.source in self.sources
            wanted = wanted and bytes(item.payload[: len(self.prefix)]) == self.prefix
        elif isinstance(item, Reconnected):
            wanted = self.reconnects
        else:
            wanted = isinstance(item, self.notices)
        if wanted:
            self._arrivals.append(item)
            self._parking.wake()

    def wake(self) -> None:
        self._parking.wake()

    def receive(self, *, deadline: float) -> Any:
        scheduler = self._link.world.scheduler
        while not self._arrivals:
            self._check()
            if deadline <= scheduler.now:
                raise DeadlineExceeded("no message arrived before the deadline")
            self._parking.wait(deadline - scheduler.now)
        return self._arrivals.popleft()

    def receive_now(self) -> Any:
        if not self._arrivals:
            self._check()
            return None
        return self._arrivals.popleft()

    def _check(self) -> None:
        if self._link.failed is not None:
            raise self._link.failed
        if self._closed:
            raise HubError("this inbox is closed")

    def close(self) -> None:
        self._closed = True
        self._arrivals.clear()
        self._link.forget(self)
        self._parking.wake()

    def __enter__(self) -> SimulatedInbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SimulatedLink:
    """One process's session."""

    def __init__(
        self,
        world: World,
        process: Process,
        *,
        session: str,
        token: str,
        line: Line,
        info: NodeInfo | None = None,
    ) -> None:
        self.world, self.process, self.line = world, process, line
        self.session, self.token, self.info = session, token, info
        self.incarnation = f"{session}#{world.number()}"
        self.counters = LinkCounters()
        self.failed: AtollError | None = None
        self.welcome = None
        self.connection: Connection | None = None
        self.dialling: Connection | None = None
        self._ids = count(1)
        self._asked: dict[int, tuple[Message, SimulatedFuture]] = {}
        self._waiting: list[tuple[str, list[bytes], SimulatedFuture, float]] = []
        self._notice_handlers: list[Callable[[Message], None]] = []
        self._reconnect_handlers: list[Callable[[], None]] = []
        self._failure_handlers: list[Callable[[AtollError], None]] = []
        self._inboxes: list[SimulatedInbox] = []
        self._early: deque[Any] | None = deque(maxlen=256)
        self._opened = 0
        self._wait_s = FIRST_WAIT_S
        self._dial()

    @property
    def connected(self) -> bool:
        return self.connection is not None

    # ------------------------------------------------------------------------- connections

    def _dial(self) -> None:
        if self.failed is None:
            self.dialling = self.world.dial(self)
            connection = self.dialling

            def late() -> None:
                if connection is not None and self.dialling is connection:
                    self.dialling = None
                    connection.close(UP)
                    self.refused(None)

            self.world.scheduler.after(ACCEPT_TIMEOUT_S, late, self.process)

    def refused(self, error: AtollError | None) -> None:
        """Nobody answered, or the hub does not want this session."""
        if error is not None and isinstance(error, AuthError | HubError):
            self.fail(error)
            return
        wait_s = self._wait_s * (0.5 + self.world.random.random())
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s)
        self.world.scheduler.after(wait_s, self._dial, self.process)

    def welcomed(self, connection: Connection) -> None:
        """The hub took the session: ask again what was not answered."""
        again = self._opened > 0
        self._opened += 1
        self.connection = connection
        self._wait_s = FIRST_WAIT_S
        for id, (body, future) in list(self._asked.items()):
            if not future.done():
                self._send_request(id, body)
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._relay(*entry)
        if again:
            self.counters.reconnects += 1
            for handler in self._reconnect_handlers:
                handler()
            self._spread(Reconnected(self.counters.reconnects))

    def disconnected(self, connection: Connection, code: int) -> None:
        if self.dialling is connection:
            self.dialling = None
            self.refused(None)
        if self.connection is not connection:
            return
        self.connection = None
        if code in FINAL:
            self.fail(AuthError("another process took this session over", given=self.session))
        else:
            self.refused(None)

    def doubt_if_silent(self) -> None:
        """Give the connection up if the hub is silent for too long; called by the world."""
        connection = self.connection
        if connection is not None and self.process.running:
            connection.close(UP)
            self.connection = None
            self.refused(None)

    def watch(self) -> None:
        """Look at the connection once the hub has been silent for long enough."""
        connection = self.connection

        def look() -> None:
            if connection is not None and self.connection is connection:
                silent = self.line.dark or not self.world.hub_answers()
                if silent:
                    self.doubt_if_silent()

        if connection is not None:
            self.world.scheduler.after(DEAD_AFTER_S + 1.0, look, self.process)

    # ----------------------------------------------------------------------------- talking

    def request(self, body: Message, *, timeout_s: float) -> Message:
        future = self.request_later(body, timeout_s=timeout_s)
        reply: Message = future.result()
        return reply

    def request_later(self, body: Message, *, timeout_s: float) -> SimulatedFuture:
        """Ask; cancelling the future withdraws the question."""
        if self.failed is not None:
            raise self.failed
        id = next(self._ids)
        future = SimulatedFuture(self.world.fibers)

        def late() -> None:
            if not future.done():
                what = f"{type(body).__name__} was not answered in time"
                future.set_exception(DeadlineExceeded(what, given=f"{timeout_s:.3g} s"))

        alarm = self.world.scheduler.after(timeout_s, late, self.process)

        def ended(_: SimulatedFuture) -> None:
            alarm.cancel()
            self._asked.pop(id, None)

        self._asked[id] = (body, future)
        future.add_done_callback(ended)
        self._send_request(id, body)
        self.world.asked(self, body)
        return future

    def _send_request(self, id: int, body: Message) -> None:
        if self.connection is None:
            return
        self.connection.send(("control", id, body), UP)
        if self.world.scheduler.now < self.line.twice_until:
            self.connection.send(("control", id, body), UP)

    def notify(self, body: Message) -> None:
        if self.failed is not None:
            raise self.failed
        if self.connection is not None:
            self.connection.send(("control", 0, body), UP)

    def relay_later(
        self, to: str, parts: Iterable[tuple[Any, Any]], *, deadline: float
    ) -> SimulatedFuture:
        future = SimulatedFuture(self.world.fibers)
        frames = [bytes(head) + bytes(piece) for head, piece in parts]
        self._relay(to, frames, future, deadline)
        return future

    def relay_all(self, to: str, parts: Iterable[tuple[Any, Any]], *, deadline: float) -> int:
        future = self.relay_later(to, parts, deadline=deadline)
        left_s = deadline - self.world.scheduler.now
        try:
            return int(future.result(max(0.0, left_s)))
        except TimeoutError:
            raise DeadlineExceeded("not all chunks were taken in time", given=to) from None

    def relay(self, to: str, parts: tuple[Any, Any], *, deadline: float) -> int:
        return self.relay_all(to, (parts,), deadline=deadline)

    def _relay(
        self, to: str, frames: list[bytes], future: SimulatedFuture, deadline: float
    ) -> None:
        if future.done():
            return
        connection, now = self.connection, self.world.scheduler.now
        if connection is None:
            self._waiting.append((to, frames, future, deadline))
            late = DeadlineExceeded("the hub is away", given=to)
            self.world.scheduler.at(deadline, lambda: future.offer(None, late), self.process)
            return
        self.world.relaying(self, to)
        for frame in frames:
            for _ in range(2 if now < self.line.twice_until else 1):
                connection.send(("relay", to, frame), UP, nbytes=len(frame) + 60)
        future.set_result(sum(map(len, frames)))

    # ----------------------------------------------------------------------------- hearing

    def subscribe(
        self,
        *,
        sources: Collection[str] | None = None,
        notices: Collection[type[Message]] = (),
        reconnects: bool = False,
        prefix: bytes = b"",
    ) -> SimulatedInbox:
        inbox = SimulatedInbox(self, sources, tuple(notices), reconnects, prefix)
        early, self._early = self._early, None
        for item in early or ():
            inbox.put(item)
        self._inboxes.append(inbox)
        return inbox

    def forget(self, inbox: SimulatedInbox) -> None:
        if inbox in self._inboxes:
            self._inboxes.remove(inbox)

    def on_notice(self, handler: Callable[[Message], None]) -> None:
        self._notice_handlers.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        self._reconnect_handlers.append(handler)

    def on_failure(self, handler: Callable[[AtollError], None]) -> None:
        self._failure_handlers.append(handler)

    def received(self, connection: Connection, message: Any) -> None:
        kind, *rest = message
        if connection is self.dialling and kind in ("welcome", "refused"):
            self.dialling = None
            if kind == "welcome":
                self.welcomed(connection)
            else:
                connection.close(UP)
                self.refused(rest[0])
            return
        if connection is not self.connection:
            return
        if kind == "answer":
            self._answered(*rest)
        elif kind == "relay":
            source, payload = rest
            self.world.delivering(self, source)
            self._spread(Relayed(source, memoryview(payload)))
        else:
            (body,) = rest
            if isinstance(body, Undeliverable):
                lost = PeerLost("nobody is there", given=body.to)
                for to, _, future, _ in self._waiting:
                    if to == body.to and not future.done():
                        future.set_exception(lost)
            for handler in self._notice_handlers:
                handler(body)
            self._spread(body)

    def _answered(self, id: int, body: Message) -> None:
        asked = self._asked.get(id)
        if asked is None or asked[1].done():
            return
        if isinstance(body, Failure):
            asked[1].set_exception(from_dict(body.error))
        else:
            asked[1].set_result(body)

    def _spread(self, item: Any) -> None:
        if self._early is not None:
            self._early.append(item)
        for inbox in self._inboxes:
            inbox.put(item)

    # -------------------------------------------------------------------------------- ends

    def close(self, body: Message | None = None, *, timeout_s: float = 5.0) -> None:
        try:
            if body is not None and self.failed is None:
                self.request(body, timeout_s=timeout_s)
        finally:
            if self.connection is not None:
                self.connection.close(UP)
            self.fail(HubError("this link to the hub is closed", given=self.session))

    def fail(self, error: AtollError) -> None:
        """End for good."""
        if self.connection is not None:
            self.connection.close(UP)
            self.connection = None
        if self.failed is not None:
            return
        self.failed = error
        for _, future in list(self._asked.values()):
            if not future.done():
                future.set_exception(error)
        for _, _, future, _ in list(self._waiting):
            if not future.done():
                future.set_exception(error)
        for inbox in self._inboxes:
            inbox.wake()
        for handler in self._failure_handlers:
            handler(error)

    def died(self) -> None:
        """The process was killed."""
        for connection in (self.connection, self.dialling):
            if connection is not None:
                connection.died(self.process)
        self.connection = self.dialling = None
