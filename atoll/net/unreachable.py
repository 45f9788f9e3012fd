"""One wording for "nobody answers there", whichever protocol was tried."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from atoll.errors import ConfigError, HubUnreachable


def place_of(url: str) -> tuple[str, int, bool]:
    """Return host, port and whether TLS is wanted of a hub's URL.

    Raises:
        ConfigError: it is not http(s)://HOST:PORT.
    """
    wrong = ConfigError("this is not the URL of a hub", given=url, expected="http://HOST:PORT")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    secure = parts.scheme in ("https", "wss")
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise wrong
    return parts.hostname, port or (443 if secure else 80), secure


def at(host: str, port: int) -> str:
    """Return HOST:PORT; the colons of an IPv6 address go into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unreachable(url: str, error: BaseException) -> HubUnreachable:
    """Return the error for a connection that could not be opened, naming host, port and reason."""
    host, port, _ = place_of(url)
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
