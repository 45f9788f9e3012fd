"""Hubs with TLS and without, machines that joined them, and sockets that misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from atoll.hub.app import HubOptions
from atoll.hub.security.connection_limits import ConnectionLimiter, Limits
from atoll.hub.server import HubServer
from atoll.hub.stores import Stores
from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity.identity import Identity
from atoll.node.identity.join import enter_cluster
from atoll.wire.messages import NodeInfo
from tests.patience import PATIENCE_S

INFO = NodeInfo("box", "Linux", "3.11", "test", cores=4, slots=1)

SPEC = '[job]\nname = "toy"\nnodes = 1\n[train]\nsteps = 100\n'

STRICT = Limits(
    strangers=40,
    strangers_per_address=20,
    head_s=PATIENCE_S,
    body_pause_s=PATIENCE_S,
    open_body_s=PATIENCE_S,
    joins_per_minute=5,
    exempt_loopback=False,
)
"""Small bounds, that hold for this machine too. Nobody is too slow for them, however busy the
machine: where somebody has to be, `hurried` says so.
"""

SHORT_S = 0.5
"""The time of somebody who will never do what is waited for."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub on loopback without TLS, with small bounds."""
    with serving(tmp_path_factory.mktemp("plain"), limits=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub that speaks TLS."""
    with serving(tmp_path_factory.mktemp("secure"), tls="on") as server:
        yield server


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[HubServer]:
    """Run a hub."""
    made = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False, **options)
    with HubServer(made) as server:
        yield server


def stores_of(hub: HubServer) -> Stores:
    assert hub.hub is not None
    return hub.hub.stores


def operator(hub: HubServer) -> HubClient:
    """Return a client with the operator's token."""
    return HubClient(hub.url, hub.operator_token, endpoint=HubEndpoint(ca=hub.ca))


def joined(hub: HubServer, home: Path, *, name: str = "box") -> Identity:
    """Make this process a node of the hub."""
    return enter_cluster(parse_ticket(hub.ticket), home=home, name=name, info=INFO)


def login(hub: HubServer, role: str, *, name: str = "anna") -> str:
    """Return the token of a fresh login."""
    with operator(hub) as client:
        ticket = parse_ticket(client.create_ticket(role=role, uses=1))
        return client.log_in(ticket.secret, name=name).token


def web(hub: HubServer, token: str = "", **more: Any) -> httpx.Client:
    """Return an HTTP client; with a token, it sends it."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    verify = ssl.create_default_context(cafile=hub.ca) if hub.ca else True
    if isinstance(verify, ssl.SSLContext):
        verify.check_hostname = False
    return httpx.Client(
        base_url=hub.url,
        headers=headers,
        timeout=PATIENCE_S,
        trust_env=False,
        verify=verify,
        **more,
    )


@contextlib.contextmanager
def raw(hub: HubServer, *, tls: bool = False) -> Iterator[socket.socket]:
    """Open a socket to the hub."""
    opened: socket.socket = socket.create_connection(("127.0.0.1", hub.port), timeout=PATIENCE_S)
    if tls:
        context = ssl.create_default_context(cafile=hub.ca)
        context.check_hostname = False
        opened = context.wrap_socket(opened)
    with opened:
        yield opened


def read_to_end(opened: socket.socket, *, timeout_s: float = PATIENCE_S) -> bytes:
    """Return everything until the other side closes; TimeoutError when it does not."""
    opened.settimeout(timeout_s)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while block := opened.recv(65_536):
            found += block
    return found


def until(condition: Callable[[], Any], *, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until a condition holds and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def limiter_of(hub: HubServer) -> ConnectionLimiter:
    """Return what counts the connections of a hub."""
    assert hub.hub is not None
    return hub.hub.limiter


@contextlib.contextmanager
def hurried(hub: HubServer, **times: float) -> Iterator[None]:
    """Give less time to what a hub begins to wait for in this block, e.g. `head_s=0.5`."""
    limiter = limiter_of(hub)
    patient = limiter.limits
    limiter.limits = dataclasses.replace(patient, **times)  # type: ignore[arg-type]
    try:
        yield
    finally:
        limiter.limits = patient


def close_code(opened: ClientConnection) -> int:
    """Read until the hub closes; return the code that it gives."""
    while True:
        try:
            opened.recv(timeout=PATIENCE_S)
        except ConnectionClosed:
            return opened.close_code or 0
