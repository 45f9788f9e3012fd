"""`atoll.connect()`: a hub's queues and topics for a program that is not a member of a job."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll import config
from atoll.config.environment import program_ticket
from atoll.errors import AuthError, ConfigError
from atoll.ids import new_suffix, safe_name
from atoll.net.endpoint import HubEndpoint, Ticket, parse_ticket
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.proxies import proxy_of
from atoll.net.sync_link import SyncLink
from atoll.net.sync_link import connect as open_session
from atoll.node.identity import tls_identity
from atoll.node.identity.identity import write_failed, write_secret
from atoll.node.processes.file_locks import FileLock
from atoll.queues import HubChannel, Queue, QueueRegistry, Topic

log = logging.getLogger(__name__)

_FILE = "programs.json"
FLUSH_TIMEOUT_S = 30.0
LOCK_TRIES, LOCK_POLL_S = 100, 0.05


@dataclass(frozen=True, slots=True)
class Login:
    """What a ticket was exchanged for."""

    url: str
    name: str
    token: str
    ca: str = ""
    proxy: str = ""


class Client:
    """A program's queues and topics; use it as a context manager.

    The promises are those of a job's queues: what was put is durable when `put` returns, a lease
    protects an item, an item that is not acknowledged comes back. A broken connection is made again
    automatically, and requests are repeated under the same number.
    """

    def __init__(self, link: SyncLink, registry: QueueRegistry, login: Login) -> None:
        """See :func:`connect`."""
        self._link, self._registry, self._login = link, registry, login

    @property
    def name(self) -> str:
        """The name of the login; the default name of subscriptions."""
        return self._login.name

    @property
    def hub(self) -> str:
        """The hub's URL."""
        return self._login.url

    @property
    def token(self) -> str:
        """For requests over HTTP: `Authorization: Bearer TOKEN`."""
        return self._login.token

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a queue by its whole name, e.g. `pool/experience`.

        Args:
            name: With a slash; the part before it is neither the name of a job nor `node`.
            options: Those of `QueueOptions`, e.g. `max_items=1000`; they are set for all users.

        Raises:
            ConfigError: the name has no slash, or an option is unknown.
        """
        return self._registry.queue(_whole(name), **options)

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a topic by its whole name; `options` as in `queue`."""
        return self._registry.topic(_whole(name), **options)

    def close(self, *, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait for what `put_later` has not stored yet, then disconnect.

        Returns:
            Whether all of it was stored in time.
        """
        done = self._registry.close(timeout_s=timeout_s)
        self._link.close()
        if not done:
            log.warning("some items were not stored by the hub within %.0f s", timeout_s)
        return done

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def connect(
    ticket: str = "", *, name: str = "", home: Path | None = None, proxy: str = "",
    timeout_s: float = 20.0,
) -> Client:  # fmt: skip
    """Connect to a hub's queues and topics.

        with atoll.connect("atoll://hub:7700/...") as hub:
            hub.queue("pool/work").put({"seed": 7})

    A ticket is exchanged for a login at its first use; this machine remembers it, so that the same
    ticket works again, also if it was for one use.

    Args:
        ticket: Of `atoll ticket new --role program`; empty: of the variable ATOLL_TICKET.
        name: Of the login, for the hub's audit log; the hub adds a suffix if it is taken.
        home: Where logins are kept; None: :func:`atoll.config.home`.
        proxy: URL of the proxy to the hub; empty: from the environment; `direct`: none.
        timeout_s: How long the first connection may take.

    Raises:
        ConfigError: it is not a ticket.
        AuthError: the ticket is invalid, or for a machine or a person.
        HubUnreachable: no hub answers.
    """
    folder = home or config.home()
    parsed = parse_ticket(ticket or program_ticket())
    login, link = _enter(parsed, name, folder, proxy, timeout_s)
    endpoint = HubEndpoint(ca=login.ca, proxy=login.proxy)
    channel = HubChannel(
        link,
        client=lambda: HubClient(login.url, login.token, endpoint=endpoint),
        scratch=Path(tempfile.gettempdir()),
    )
    return Client(link, QueueRegistry(channel, prefix="", reader=login.name), login)


def _whole(name: str) -> str:
    if "/" not in name.strip("/"):
        raise ConfigError(
            "a program names queues in full", given=repr(name),
            expected="a name with a slash, e.g. pool/experience",
        )  # fmt: skip
    return name


def _enter(
    ticket: Ticket, name: str, home: Path, proxy: str, timeout_s: float
) -> tuple[Login, SyncLink]:
    """Open a session with this machine's login, or else exchange the ticket for one."""
    refused: AuthError | None = None
    kept = _load(home / _FILE).get(_key_of(ticket))
    if kept is not None:
        kept = replace(kept, proxy=proxy_of(proxy, hub=ticket.url, kept=kept.proxy))
        try:
            return kept, _open(kept, timeout_s)
        except AuthError as error:  # a hub that was reset may take the ticket again
            refused = error
    try:
        login = _log_in(ticket, name, home, proxy)
    except AuthError:
        if refused is not None:
            raise refused from None
        raise
    return login, _open(login, timeout_s)


def _open(login: Login, timeout_s: float) -> SyncLink:
    session = f"program/{login.name}.{new_suffix()}"
    endpoint = HubEndpoint(ca=login.ca, proxy=login.proxy)
    hello = make_hello(session, login.token)
    return open_session(login.url, hello, endpoint=endpoint, timeout_s=timeout_s)


def _log_in(ticket: Ticket, name: str, home: Path, proxy: str) -> Login:
    """Exchange a ticket for a login, and remember it."""
    through = proxy_of(proxy, hub=ticket.url, kept="")
    ca = tls_identity.pin(ticket, home=home, proxy=through)
    with HubClient(ticket.url, endpoint=HubEndpoint(ca=ca, proxy=through)) as client:
        made = client.log_in(ticket.secret, name=safe_name(name or "program"))
    if made.role == "viewer":
        raise AuthError(
            "this ticket is for a person who looks", given="a viewer's ticket",
            expected="a program's", remedy="atoll ticket new --role program",
        )  # fmt: skip
    login = Login(ticket.url, made.name, made.token, ca, through)
    path = home / _FILE
    with _locked(path):
        logins = _load(path) | {_key_of(ticket): login}
        write_secret(path, json.dumps({key: asdict(value) for key, value in logins.items()}))
    return login


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other programs of this machine from changing the file meanwhile.

    Goes on without the lock after a while: some network file systems have none.
    """
    lock = FileLock(path.with_suffix(".lock"))
    try:
        for _ in range(LOCK_TRIES):
            if lock.try_lock(shared=False):
                break
            time.sleep(LOCK_POLL_S)
    except OSError as error:
        raise write_failed(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _key_of(ticket: Ticket) -> str:
    return hashlib.sha256(str(ticket).encode()).hexdigest()


def _load(path: Path) -> dict[str, Login]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: Login(**fields) for key, fields in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none yet, or unreadable: the ticket is exchanged again
