"""One life of the hub: the real rules, rounds, membership and placement on simulated sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atoll.errors import AtollError, WireError
from atoll.hub import app
from atoll.hub.alarms.store import Alarms
from atoll.hub.housekeeping import Housekeeping
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.observability.logs import Logs
from atoll.hub.observability.metrics import Metrics
from atoll.hub.quotas.ledger import Ledger
from atoll.hub.security.auth import Auth, Identity
from atoll.hub.security.secrets import Secrets
from atoll.hub.sessions.send_queue import SendQueue
from atoll.hub.sessions.session import Sessions
from atoll.hub.stores import Stores
from atoll.simulate.scheduler import Process
from atoll.wire.messages import Credit, Envelope, Hello, Message, Undeliverable
from tests.faults.simulation.disk import (
    SimulatedBlobs,
    SimulatedDatabase,
    SimulatedEvents,
    SimulatedFiles,
)
from tests.faults.simulation.loop import VirtualLoop
from tests.faults.simulation.network import DOWN, Connection

if TYPE_CHECKING:
    from tests.faults.simulation.link import SimulatedLink
    from tests.faults.simulation.world import World

NOWHERE = Path("/nonexistent")


class SimulatedSession:
    """Stands in for the hub's `Session`: messages travel as objects over one connection."""

    def __init__(
        self, *, address: str, incarnation: str, identity: Identity, info: Any, send_queue: Any,
        last_seen: float, **more: Any,
    ) -> None:  # fmt: skip
        self.address, self.incarnation, self.identity = address, incarnation, identity
        self.info, self.send_queue = info, send_queue
        self.generation = 0
        self.connected = False
        self.gone_since = 0.0
        self.source = ""
        self.stats: dict[str, float] = {}
        self.requests: dict[int, asyncio.Task[Any]] = {}
        self.notices = 0
        self.hang_up: Any = lambda code, reason: None
        self.connection: Connection | None = None
        self.queued: list[tuple[Any, int]] = []
        self._heard = last_seen
        vars(self).update(more)

    @property
    def job(self) -> str:
        return self.address.partition("/")[0] if "/" in self.address else ""

    @property
    def member(self) -> str:
        return self.address.partition("/")[2]

    @property
    def last_seen(self) -> float:
        """Beats are not simulated one by one: a client that acts has been heard lately."""
        if self.connection is not None and self.connected:
            self._heard = max(self._heard, self.connection.heard_of_client())
        return self._heard

    @last_seen.setter
    def last_seen(self, when: float) -> None:
        self._heard = when

    def notify(self, body: Message) -> None:
        self.put(("notice", body), passing=isinstance(body, Credit | Undeliverable))

    def answer(self, envelope: Envelope, body: Message) -> None:
        self.put(("answer", envelope.id, body))

    def put(self, message: Any, *, passing: bool = False, nbytes: int = 200) -> None:
        """Send, or keep for the next connection of this process."""
        if self.connected and self.connection is not None:
            self.connection.send(message, DOWN, nbytes=nbytes)
        elif not passing:
            self.queued.append((message, nbytes))


class SimulatedHistory:
    """Stands in for the buckets of figures: nobody measures anything here."""

    async def flush(self) -> None: ...

    async def trim(self) -> None: ...


class HubLife(Process):
    """The hub's process from its start to its kill."""

    def __init__(self, world: World) -> None:
        super().__init__(world.scheduler, f"hub#{world.number()}")
        self.world = world
        self.ready = False
        self.dependents: list[Process] = []
        """Processes that end with the hub."""
        world.starting_hub = self
        loop: Any = VirtualLoop  # asks of an event loop what nobody here needs
        self.loop: VirtualLoop = loop(world.scheduler, self)
        disk = world.disk
        disk.queue.reopen()
        database: Any = SimulatedDatabase(disk, self.loop, self)
        events: Any = SimulatedEvents(disk)
        files: Any = SimulatedFiles(disk)
        blobs: Any = SimulatedBlobs()
        history: Any = SimulatedHistory()
        clock = world.scheduler
        self.stores = Stores(
            database=database,
            queue=disk.queue,
            auth=Auth(database, clock=clock),
            jobs=Jobs(database, events=events, jobs_dir=NOWHERE, clock=clock),
            logs=Logs(database, clock=clock),
            metrics=Metrics(database, jobs_dir=NOWHERE),
            events=events,
            history=history,
            files=files,
            blobs=blobs,
            alarms=Alarms(database),
            secrets=Secrets(database, folder=NOWHERE, clock=clock),
            ledger=Ledger(clock=clock),
        )
        options = app.HubOptions(
            data=NOWHERE, jobs=NOWHERE, reducers=world.reducers_beside_hub, **world.hub_options
        )
        self.hub = app.Hub(options, self.stores, url="http://hub", clock=clock)
        self.sessions: Sessions = self.hub.sessions
        self._watch_verdicts()
        self.start(self._begin())

    async def _begin(self) -> None:
        await self.hub.scheduler.restart()
        self.hub.tasks.start(Housekeeping(self.hub).run(), name="housekeeping")
        self.ready = True

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something on the hub's loop."""
        self.loop.create_task(work)

    def _watch_verdicts(self) -> None:
        """Name the moment between the durable verdict and its telling."""
        book, store = self.hub.rounds.store, self.hub.rounds.store.add_verdict

        async def add_verdict(*args: Any, **kwargs: Any) -> None:
            await cast(Any, store)(*args, **kwargs)
            self.world.reached("hub", "verdict stored", self)
            await asyncio.sleep(0)

        cast(Any, book).add_verdict = add_verdict

    def kill(self) -> None:
        if not self.alive:
            return
        super().kill()
        for process in self.dependents:
            process.kill()
        for session in self.sessions.all():
            connection = cast(Any, session).connection
            if connection is not None:
                connection.died(self)
        self.loop.drop()

    # -------------------------------------------------------------------------- connections

    def accept(self, connection: Connection, link: SimulatedLink) -> None:
        """Take a session as the endpoint does after a Hello."""
        try:
            identity = self.world.identify(self, link)
        except AtollError as error:
            connection.send(("refused", error), DOWN)
            return
        hello = Hello(
            protocol=1, version="", session=link.session, token="",
            incarnation=link.incarnation, info=link.info,
        )  # fmt: skip
        attached: list[Any] = []
        self._act(lambda: attached.extend(self.sessions._attach(hello, identity)))
        found, resumed = attached
        session = cast(SimulatedSession, found)
        session.connection = connection
        connection.number = session.generation
        connection.heard = self.scheduler.now
        vars(connection)["session"] = session
        session.hang_up = lambda code, reason: self._hang_up(session, connection, code)
        connection.send(("welcome",), DOWN)
        queued, session.queued = session.queued, []
        for message, nbytes in queued:
            session.put(message, nbytes=nbytes)
        self._act(lambda: self.hub.opened(found, resumed=resumed))

    def _hang_up(self, session: SimulatedSession, connection: Connection, code: int) -> None:
        connection.close(DOWN, code)
        self._gone(session, connection)

    def _gone(self, session: SimulatedSession, connection: Connection) -> None:
        if session.generation == connection.number and session.connection is connection:
            session.last_seen = session.last_seen  # what was known while it was connected
            session.connected = False
            session.gone_since = self.scheduler.now
            session.hang_up = lambda code, reason: None

    def disconnected(self, connection: Connection, code: int) -> None:
        session = vars(connection).get("session")
        if session is not None:
            self._gone(session, connection)

    def received(self, connection: Connection, message: Any) -> None:
        kind, first, second = message
        if kind == "hello":
            self.accept(connection, first)
            return
        session: Any = vars(connection).get("session")
        if session is None or session.connection is not connection:
            return
        if kind == "relay":
            self._forward(session, first, second)
            return
        try:
            self._act(lambda: self.hub.received(session, Envelope(first, False, second)))
        except WireError as error:
            self.world.note(f"hub refuses {session.address}: {error}")
            self._hang_up(session, connection, 1002)

    def _forward(self, session: SimulatedSession, to: str, payload: bytes) -> None:
        receiver = cast(Any, self.sessions.get(to))
        if receiver is None or receiver.job != session.job:
            session.notify(Undeliverable(to))
        else:
            receiver.put(("relay", session.address, payload), nbytes=len(payload) + 60)

    def _act(self, call: Any) -> None:
        """Call into the hub with its loop running, as a callback of the loop would."""
        asyncio._set_running_loop(self.loop)
        try:
            call()
        finally:
            asyncio._set_running_loop(None)


def no_send_queue(**kwargs: Any) -> SendQueue:
    """Stand in for `SendQueue`, of which a simulated session uses nothing."""
    return cast(SendQueue, _NoSendQueue())


class _NoSendQueue:
    def drop_transient(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []
