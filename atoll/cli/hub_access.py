"""Which hub a command uses, and with which token: remembered from `atoll hub` and `atoll login`."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll import config
from atoll.errors import AuthError, ConfigError
from atoll.ids import safe_name
from atoll.net.endpoint import HubEndpoint, Ticket, parse_ticket
from atoll.net.http.client import HubClient
from atoll.net.proxies import DIRECT, proxy_of
from atoll.node.identity import identity, tls_identity

_FILE = "hubs.json"

HOW_TO_LOG_IN = (
    "`atoll ticket new --role operator` on the hub's machine prints a ticket for `atoll login`"
)


ALONE = "use --local N for a run on this machine alone"


@dataclass(frozen=True, slots=True)
class KnownHub:
    """A hub for which this user has a token."""

    url: str
    token: str
    operator: bool = False
    """Whether the token is an operator's; a viewer's is read-only."""
    ca: str = ""
    """PEM file of the hub's certificate authority; empty: not pinned."""
    proxy: str = ""
    """URL of the proxy given at the login; empty: from the environment."""

    def client(self, *, timeout_s: float = 30.0) -> HubClient:
        """Return a client of the hub's REST interface."""
        endpoint = HubEndpoint(ca=self.ca, proxy=proxy_of("", hub=self.url, kept=self.proxy))
        return HubClient(self.url, self.token, endpoint=endpoint, timeout_s=timeout_s)


def remember(hub: KnownHub, *, home: Path | None = None) -> None:
    """Make this the default hub; an operator's token is not replaced by a viewer's."""
    path = (home or config.home()) / _FILE
    hubs = _load(path)
    old = hubs.get(hub.url)
    if hub.operator or old is None or not old.operator:
        old = hub
    hubs.pop(hub.url, None)
    _keep(path, [*hubs.values(), old])


def forget(hub: KnownHub, *, home: Path | None = None) -> None:
    """Forget a hub."""
    path = (home or config.home()) / _FILE
    _keep(path, [known for known in _load(path).values() if known.url != hub.url])


def find(where: str = "", *, home: Path | None = None, without: str = "") -> KnownHub:
    """Return the hub to use.

    Args:
        where: A join ticket, a URL, or empty for the hub used last on this machine.
        home: Where hubs are remembered; None: :func:`atoll.config.home`.
        without: What the command can do without a hub, for the error message.

    Raises:
        ConfigError: no hub is known.
        AuthError: this machine has no token of that hub.
    """
    folder = home or config.home()
    hubs = _load(folder / _FILE)
    if where.startswith("atoll://"):
        ticket = parse_ticket(where)
        if ticket.url in hubs:
            return hubs[ticket.url]
        return log_in(ticket, home=folder)
    if where:
        address = where.rstrip("/")
        urls = [address] if "://" in address else [f"http://{address}", f"https://{address}"]
        known = next((hubs[url] for url in urls if url in hubs), None)
        if known is None:
            raise AuthError(
                "this machine has no login at that hub",
                given=urls[0],
                expected="one of " + ", ".join(hubs) if hubs else "a hub it has logged in to",
                remedy=HOW_TO_LOG_IN,
            )
        return known
    if not hubs:
        raise ConfigError(
            "no hub is known on this machine",
            expected="a hub that was started here, or a login (a node that joined has none)",
            remedy=f"start one with `atoll hub`; {HOW_TO_LOG_IN}"
            + (f"; or {without}" if without else ""),
        )
    return list(hubs.values())[-1]


def log_in(
    ticket: Ticket, *, home: Path | None = None, name: str = "", proxy: str = ""
) -> KnownHub:
    """Exchange a ticket for a login, remember it, and return it.

    Args:
        ticket: For an operator or a viewer.
        home: Where hubs are remembered; None: :func:`atoll.config.home`.
        name: Name of the login in the hub's audit log; empty: user and machine.
        proxy: URL of the proxy to the hub; empty: from the environment; `direct`: none.

    Raises:
        AuthError: the ticket is invalid, or is for a machine.
        HubUnreachable: no hub answers.
    """
    folder = home or config.home()
    through = proxy_of(proxy, hub=ticket.url, kept="")
    ca = tls_identity.pin(ticket, home=folder, proxy=through)
    with HubClient(ticket.url, endpoint=HubEndpoint(ca=ca, proxy=through)) as client:
        login = client.log_in(ticket.secret, name=safe_name(name or _who_is_here()))
    if login.role == "program":
        raise AuthError(
            "this ticket is for a program", given="its login can use queues only",
            remedy="use it with `atoll.connect`; `atoll ticket new --role operator` prints one "
            "for people",
        )  # fmt: skip
    operator = login.role == "operator"
    kept = "" if proxy == DIRECT else proxy
    hub = KnownHub(ticket.url, login.token, operator=operator, ca=ca, proxy=kept)
    remember(hub, home=folder)
    return hub


def _who_is_here() -> str:
    """Return user and machine, for the audit log."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}-{platform.node()}"


def _keep(path: Path, hubs: list[KnownHub]) -> None:
    """Write the hubs to disk, the newest last, readable by their owner only."""
    identity.write_secret(path, json.dumps([asdict(hub) for hub in hubs], indent=1))


def _load(path: Path) -> dict[str, KnownHub]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {entry["url"]: KnownHub(**entry) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
