"""Which hub a command speaks to, and with which token: remembered from `hub` and `join`."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

from atoll import config
from atoll.errors import AuthError, ConfigError
from atoll.ids import safe_name
from atoll.net.api import HubClient
from atoll.net.ticket import parse_ticket
from atoll.node import identity, probe

_FILE = "hubs.json"


@dataclass(frozen=True, slots=True)
class KnownHub:
    """A hub that this person may use."""

    url: str
    token: str
    operator: bool = False
    """Whether the token is the operator's (the hub was started here)."""

    def client(self, *, timeout_s: float = 30.0) -> HubClient:
        """Return a client of the hub's REST interface."""
        return HubClient(self.url, self.token, timeout_s=timeout_s)


def remember(hub: KnownHub, *, home: Path | None = None) -> None:
    """Make this the hub that commands use from now on; an operator's token is not given up."""
    path = (home or config.home()) / _FILE
    hubs = _load(path)
    old = hubs.get(hub.url)
    if hub.operator or old is None or not old.operator:
        old = hub
    hubs.pop(hub.url, None)
    rest = [{"url": h.url, "token": h.token, "operator": h.operator} for h in hubs.values()]
    newest = {"url": old.url, "token": old.token, "operator": old.operator}
    identity.write_private(path, json.dumps([*rest, newest], indent=1))


def find(where: str = "", *, home: Path | None = None) -> KnownHub:
    """Return the hub to use.

    Args:
        where: A join ticket, a URL, or empty for the hub used last on this machine.
        home: Where it is remembered; None: :func:`atoll.config.home`.

    Raises:
        ConfigError: no hub is known.
        AuthError: that hub gave this machine no token.
    """
    folder = home or config.home()
    hubs = _load(folder / _FILE)
    if where.startswith("atoll://"):
        ticket = parse_ticket(where)
        if ticket.url in hubs:
            return hubs[ticket.url]
        return _enter(ticket.url, ticket.secret, folder)
    if where:
        url = where.rstrip("/") if "://" in where else f"http://{where.rstrip('/')}"
        if url not in hubs:
            raise AuthError(
                "this machine has no token for that hub",
                given=url,
                expected="one of " + ", ".join(hubs) if hubs else "a hub it has joined",
                remedy="give the join ticket that `atoll hub` printed: --hub atoll://...",
            )
        return hubs[url]
    if not hubs:
        raise ConfigError(
            "no hub is known on this machine",
            expected="a hub that was started or joined here",
            remedy="start one with `atoll hub`, give --hub TICKET, or use --local N for a run "
            "on this machine alone",
        )
    return list(hubs.values())[-1]


def _enter(url: str, secret: str, folder: Path) -> KnownHub:
    """Join a hub for its REST interface alone, without serving as a node."""
    info = probe.node_info(folder, slots=0)
    with HubClient(url) as client:
        _, token = client.join(secret, name=safe_name(f"cli-{platform.node()}"), info=info)
    hub = KnownHub(url, token)
    remember(hub, home=folder)
    return hub


def _load(path: Path) -> dict[str, KnownHub]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {entry["url"]: KnownHub(**entry) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def newest_job(client: HubClient) -> str:
    """Return the job that was submitted last.

    Raises:
        ConfigError: there is none.
    """
    jobs = client.jobs()
    if not jobs:
        raise ConfigError(
            "the hub has no job", expected="a job", remedy="submit one with `atoll run`"
        )
    return str(jobs[0]["job"])
