"""Announce the hub on the local network (DNS-SD, `_atoll._tcp.local.`).

The record grants no access. It has a name, a port, the path prefix, the version, whether TLS is on,
and the fingerprint of the hub's authority, which a person compares with the hub's own output.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import platform
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from atoll import __version__
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_atoll._tcp.local."

CLOSE_TIMEOUT_S = 2.0
MAX_HOST = 50
"""Characters of the host's name in that of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MdnsRegistration:
    """The contents of the record."""

    host: str
    """Address on which the hub listens."""
    port: int
    prefix: str = ""
    secure: bool = False
    fingerprint: str = ""

    @property
    def label(self) -> str:
        """The hub's name on the network: at most the 63 characters of a DNS label."""
        return f"{platform.node()[:MAX_HOST] or 'hub'}-{self.port}"

    def properties(self) -> dict[str, str]:
        """Return the TXT fields of the record."""
        return {
            "name": platform.node(),
            "prefix": self.prefix,
            "tls": "1" if self.secure else "0",
            "fingerprint": self.fingerprint,
            "version": __version__,
        }


class MdnsAnnouncement:
    """Announces a hub until it is closed."""

    def __init__(self, announced: MdnsRegistration) -> None:
        self._announced = announced
        self._zeroconf: AsyncZeroconf | None = None

    async def start(self, *, needed: bool) -> None:
        """Publish the record; failures raise ConfigError if `needed`, else they are logged."""
        from zeroconf import IPVersion, ServiceInfo
        from zeroconf.asyncio import AsyncZeroconf

        announced = self._announced
        addresses = await asyncio.to_thread(addresses_of, announced.host)
        service = ServiceInfo(
            SERVICE,
            f"{announced.label}.{SERVICE}",
            port=announced.port,
            parsed_addresses=addresses,
            properties=announced.properties(),
            server=f"{announced.label}.local.",
        )
        try:
            if not addresses:
                raise OSError(f"{announced.host or 'this machine'} has no IPv4 address")
            self._zeroconf = AsyncZeroconf(interfaces=addresses, ip_version=IPVersion.V4Only)
            await self._zeroconf.async_register_service(service, allow_name_change=True)
        except OSError as error:
            await self.close()
            if needed:
                raise ConfigError(
                    "the hub cannot be announced on this network",
                    given=str(error),
                    remedy="leave --announce out, and use tickets on the other machines",
                ) from error
            logger.info("the hub is not announced on this network: %s", error)

    async def close(self) -> None:
        """Withdraw the record."""
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await zeroconf.async_unregister_all_services()
            await zeroconf.async_close()


def addresses_of(host: str) -> list[str]:
    """Return the IPv4 addresses of a hub bound to `host`; may wait for a name server.

    Those of loopback are among them only if the machine is on no network at all.
    """
    if host not in ("", "0.0.0.0", "::"):
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return []
        return sorted({str(entry[4][0]) for entry in found})
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    own = {entry.address for entry in entries if entry.family == socket.AF_INET}
    outside = sorted(text for text in own if not ipaddress.ip_address(text).is_loopback)
    if outside or any(e.family == socket.AF_INET6 and _is_routed(e.address) for e in entries):
        return outside
    return sorted(own)


def _is_routed(text: str) -> bool:
    """Return whether other machines may reach an IPv6 address that a network has assigned."""
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local)


def announcement_of(url: str, *, host: str, prefix: str, fingerprint: str) -> MdnsAnnouncement:
    """Return the announcement of a hub at `url` that listens on `host`."""
    parsed = urlsplit(url)
    registration = MdnsRegistration(
        host=host, port=parsed.port or 0, prefix=prefix, secure=parsed.scheme == "https",
        fingerprint=fingerprint,
    )  # fmt: skip
    return MdnsAnnouncement(registration)
