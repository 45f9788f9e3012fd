"""Believes what a reverse proxy says of its clients, if it is one that the operator named.

A hub below a path prefix, e.g. `https://HOST/atoll`, whether or not the proxy takes it off.
"""

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
"""Addresses in `X-Forwarded-For` that are looked at, from its end."""


class TrustedProxies:
    """The addresses from which `X-Forwarded-For` and `X-Forwarded-Proto` count."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        """Trust these addresses and networks.

        Raises:
            ConfigError: one is neither.
        """
        self._trusted = networks(addresses)

    def trusts(self, address: str) -> bool:
        """Return whether this is the address of a proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in network for network in self._trusted)

    def look_behind(self, scope: Scope) -> None:
        """Put the client's address and scheme into the scope of a connection from a proxy.

        The last address that is no proxy's is the client's: what stands before it in the header,
        the client may have written itself.
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
    """Return the network address that a connection or a request comes from."""
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
    """Return a prefix with a slash at its start and none at its end; empty: none.

    Raises:
        ConfigError: it has other characters than addresses of hubs may have.
    """
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
    """Return what tickets say of a hub's address, and the prefix that its requests may have.

    Args:
        advertise: What a person wants to be told: nothing, HOST, HOST:PORT or a whole URL.
        prefix: The prefix; empty: the path of that URL.

    Raises:
        ConfigError: the prefix, or the path of the URL, is none that a hub may have.
    """
    prefix = check_prefix(prefix)
    if "://" not in advertise:
        return advertise, prefix
    path = check_prefix(urlsplit(advertise).path)
    if path:
        return advertise, prefix or path
    return advertise.rstrip("/") + prefix, prefix


def without_prefix(scope: MutableMapping[str, Any], prefix: str) -> MutableMapping[str, Any]:
    """Return the scope of a request as it would be without a prefix; others as they are."""
    path = str(scope.get("path", ""))
    if not prefix or not (path == prefix or path.startswith(f"{prefix}/")):
        return scope
    changed = dict(scope)
    changed["path"] = path[len(prefix) :] or "/"
    raw = scope.get("raw_path")
    if isinstance(raw, bytes) and raw.startswith(prefix.encode()):
        changed["raw_path"] = raw[len(prefix) :] or b"/"
    return changed
