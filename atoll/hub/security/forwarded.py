"""Reverse proxies: forwarded client addresses, and hubs below a path prefix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from atoll.errors import ConfigError
from atoll.hub.security.connection_limits import networks

MAX_HOPS = 20
"""Addresses of `X-Forwarded-For` that are examined, from its end."""


class TrustedProxies:
    """Proxies that may set `X-Forwarded-For` and `-Proto`; raises ConfigError for a bad address."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._trusted = networks(addresses)

    def trusts(self, address: str) -> bool:
        """Return whether this is the address of a trusted proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in network for network in self._trusted)

    def look_behind(self, scope: Scope) -> None:
        """Replace client address and scheme in the scope of a connection from a trusted proxy.

        The client is the last address that is not a trusted proxy; earlier ones may be forged.
        """
        client = scope.get("client")
        if not self._trusted or not client or not self.trusts(str(client[0])):
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})["proxied"] = True
        hops = [hop.strip() for line in headers.getlist("x-forwarded-for")
                for hop in line.split(",")][-MAX_HOPS:]  # fmt: skip
        for hop in reversed(hops):
            if not _is_address(hop):
                break
            scope["client"] = (hop, 0)
            if not self.trusts(hop):
                break
        if headers.get("x-forwarded-proto", "").strip().lower() == "https":
            scope["scheme"] = "wss" if scope["type"] == "websocket" else "https"


def source_of(scope: Scope) -> str:
    """Return the network address of the client, or `unknown`."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_PREFIX = re.compile(r"(?:/[A-Za-z0-9_.-]+)*")


def check_prefix(text: str) -> str:
    """Normalize a prefix to `/PATH` or empty; raises ConfigError for characters not allowed."""
    prefix = text.strip().strip("/")
    prefix = f"/{prefix}" if prefix else ""
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            "this cannot be the path of a hub",
            given=text,
            expected="letters, digits, dots and dashes between slashes, e.g. /atoll",
        )
    return prefix


def forwarded_address(advertise: str, prefix: str) -> tuple[str, str]:
    """Return the address to advertise in tickets, and the path prefix of requests.

    `advertise` is empty, HOST, HOST:PORT or a whole URL; an empty `prefix` is taken from its path.
    Raises ConfigError for an invalid prefix.
    """
    prefix = check_prefix(prefix)
    if "://" not in advertise:
        return advertise, prefix
    path = check_prefix(urlsplit(advertise).path)
    if path:
        return advertise, prefix or path
    return advertise.rstrip("/") + prefix, prefix


def without_prefix(scope: MutableMapping[str, Any], prefix: str) -> MutableMapping[str, Any]:
    """Return the scope of a request with the prefix removed; other scopes unchanged."""
    path = str(scope.get("path", ""))
    if not prefix or not (path == prefix or path.startswith(f"{prefix}/")):
        return scope
    changed = dict(scope)
    changed["path"] = path[len(prefix) :] or "/"
    raw = scope.get("raw_path")
    if isinstance(raw, bytes) and raw.startswith(prefix.encode()):
        changed["raw_path"] = raw[len(prefix) :] or b"/"
    return changed
