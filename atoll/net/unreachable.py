"""One wording for "nobody answers there", whichever protocol was tried."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from atoll.errors import ConfigError, HubUnreachable


@dataclass(frozen=True, slots=True)
class Place:
    """Where a hub is."""

    host: str
    port: int
    secure: bool
    """Whether TLS is spoken there."""
    prefix: str = ""
    """Path below which it is, e.g. `/atoll` behind a reverse proxy; empty or without end slash."""

    @property
    def url(self) -> str:
        """The hub's URL, http(s)://HOST:PORT[/PREFIX]."""
        return f"{'https' if self.secure else 'http'}://{at(self.host, self.port)}{self.prefix}"

    @property
    def websocket(self) -> str:
        """The URL of its WebSocket."""
        scheme = "wss" if self.secure else "ws"
        return f"{scheme}://{at(self.host, self.port)}{self.prefix}/ws"


def place_of(url: str) -> Place:
    """Return where the hub of a URL is.

    Raises:
        ConfigError: it is not http(s)://HOST:PORT[/PREFIX].
    """
    form = "http://HOST:PORT or https://HOST:PORT/PREFIX"
    wrong = ConfigError("this is not the URL of a hub", given=url, expected=form)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    secure = parts.scheme in ("https", "wss")
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise wrong
    if parts.query or parts.fragment:
        raise wrong
    default = 443 if secure else 80
    return Place(parts.hostname, port or default, secure, parts.path.rstrip("/"))


def at(host: str, port: int) -> str:
    """Return HOST:PORT; the colons of an IPv6 address go into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unreachable(url: str, error: BaseException) -> HubUnreachable:
    """Return the error for a connection that could not be opened, naming host, port and reason."""
    place = place_of(url)
    host, port = place.host, place.port
    reason, remedy = _diagnosis(error, host=host, port=port)
    return HubUnreachable(
        f"no hub answers at {at(host, port)}",
        given=reason,
        expected=f"a hub that listens on port {port} of {host}",
        remedy=remedy,
    )


def _diagnosis(error: BaseException, *, host: str, port: int) -> tuple[str, str]:
    """Return what went wrong and what to do about it."""
    text = str(error)
    if isinstance(error, ConnectionRefusedError) or "refused" in text.lower():
        return "connection refused", f"start `atoll hub --port {port}` there, or correct the port"
    if isinstance(error, TimeoutError) or "timed out" in text.lower():
        return (
            "timed out",
            f"check the address, and that a firewall lets TCP port {port} of {host} through",
        )
    if isinstance(error, socket.gaierror) or "getaddrinfo" in text or "resolution" in text:
        return f"the name {host} cannot be resolved", "use the machine's IP address instead"
    return text or type(error).__name__, "check the address and the network"
