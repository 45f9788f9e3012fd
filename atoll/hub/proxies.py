"""Believes what a reverse proxy says of its clients, if it is one that the operator named."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from atoll.hub.admission import networks

MAX_HOPS = 20
"""Addresses in `X-Forwarded-For` that are looked at, from its end."""


class Proxies:
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
