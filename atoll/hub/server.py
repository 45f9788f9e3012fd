"""Serve a hub on one port, as a program or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn

from atoll.errors import ConfigError, HubError, PortTaken
from atoll.hub.app import Hub, HubOptions, open_hub
from atoll.hub.security.connection_limits import is_loopback
from atoll.hub.security.tls import choose
from atoll.hub.sessions.uvicorn_protocols import WebSocketProtocol, protocol_factory
from atoll.system import UNSENT_OPTION, allow_many_files
from atoll.wire.limits import MAX_FRAME_BYTES, UNSENT_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 30.0

FILES = 65_536


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port (0: any); raises PortTaken, ConfigError."""
    bound: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        if os.name == "posix":  # elsewhere the option would let two programs share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if UNSENT_OPTION is not None:  # inherited by accepted connections
            bound.setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        if bound is not None:
            bound.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                "the hub cannot listen on this address",
                given=f"{host}:{port} ({error})",
                expected="an address of this machine, e.g. 127.0.0.1 or 0.0.0.0",
            ) from error
        raise PortTaken(
            "the hub cannot listen on this port",
            given=f"{host}:{port} ({error.strerror})",
            remedy="stop the program that uses it (is a hub running already?) "
            "or choose another port with --port",
        ) from error
    return bound


def own_host() -> str:
    """Return the address of the default route's interface, for the ticket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def reachable_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return the URL of a hub bound to `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = own_host()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


ACCEPTED_AT_ONCE = 64
"""Connections accepted before other events are processed: that takes 2 ms instead of 60."""

BACKLOG = 2_048
"""Connections that may wait to be accepted, e.g. when a hub is back after a restart."""


ENDING_S = 1.0
"""Time limit for requests that were cancelled."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handling, with a callback when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the program that started the hub has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting, then call `on_ready`."""
        await super().startup(sockets=sockets)
        for one in sockets or ():
            one.listen(BACKLOG)  # the event loop accepts no more at once, but more may wait
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop without uvicorn's log lines about open streams."""
        log = logging.getLogger("uvicorn.error")
        drop = _Drop()  # no level: two servers that end at once would not restore it
        log.addFilter(drop)
        try:
            await super().shutdown(sockets=sockets)
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # its peer neither read nor closed in time
            if tasks := list(self.server_state.tasks):  # cancelled: they end with a log line
                await asyncio.wait(tasks, timeout=ENDING_S)
        finally:
            log.removeFilter(drop)


class _Drop(logging.Filter):
    """Drops all records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False."""
        return False


class HubServer:
    """Serves a hub until it is stopped.

    As a program: ``await server.serve(on_ready=...)`` with ``server.stop()`` from a signal handler.
    Inside another process: ``with HubServer(options) as hub: hub.url, hub.ticket, ...`` runs it in
    a thread with its own event loop.
    """

    def __init__(self, options: HubOptions) -> None:
        self._options = options
        self._server: _Uvicorn | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.hub: Hub | None = None
        self.url = ""
        self.port = 0
        self.ticket = ""
        self.operator_token = ""
        self.ca = ""
        """PEM file with the authority that clients on this machine trust; empty without TLS."""

    @property
    def is_exposed(self) -> bool:
        """Whether the hub accepts unencrypted connections from other machines."""
        return not self.ca and not is_loopback(self._options.host)

    async def serve(self, *, on_ready: Callable[[], None]) -> None:
        """Serve until :meth:`stop`.

        Raises:
            PortTaken: another program listens on the port.
            HubError: the data folder cannot be used.
        """
        bound = bind(self._options.host, self._options.port)
        try:
            self.port = bound.getsockname()[1]
            scheme = choose(self._options.tls, host=self._options.host).scheme
            self.url = reachable_url(self._options.host, self.port, scheme=scheme)
            hub = self.hub = await open_hub(self._options, url=self.url)
            try:
                await hub.start()
                self.ticket, self.operator_token = hub.ticket, hub.operator_token
                self.ca = hub.ca
                if self.is_exposed:
                    logger.warning("this hub listens without TLS at %s", self.url)
                self._loop = asyncio.get_running_loop()
                self._server = _Uvicorn(_config(hub), on_ready)
                self._server.should_exit = self._stopping
                await self._server.serve(sockets=[bound])
            finally:
                await hub.close()
        finally:
            bound.close()

    def stop(self) -> None:
        """Make :meth:`serve` return soon; safe in signal handlers and from other threads."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True

    # --------------------------------------------------------------- inside another process

    def __enter__(self) -> Self:
        """Start a thread; return when the hub accepts connections."""
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self.stop()
            raise HubError("the hub did not start in time", expected=f"{START_TIMEOUT_S:g} s")
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the hub and join its thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(START_TIMEOUT_S)

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float = 30.0) -> T:
        """Run a coroutine on the hub's event loop and return its result."""
        if self._loop is None:
            raise HubError("the hub is not running")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _run(self) -> None:
        try:
            run(self, on_ready=self._ready.set)
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()


def run(server: HubServer, *, on_ready: Callable[[], None]) -> None:
    """Serve on the fastest installed event loop until the server is stopped."""
    allow_many_files(FILES)
    factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(server.serve(on_ready=on_ready))


def _config(hub: Hub) -> uvicorn.Config:
    """Return uvicorn's configuration; heartbeats replace its pings."""
    tls = hub.tls
    factory: Any = protocol_factory(hub.limiter, (lambda: tls.context) if tls else None)
    return uvicorn.Config(
        hub.asgi,
        interface="asgi3",
        backlog=ACCEPTED_AT_ONCE,
        proxy_headers=False,
        ws=WebSocketProtocol,
        http=factory,
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=1,
    )
