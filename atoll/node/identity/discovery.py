"""Discovery of hubs on the local network (DNS-SD)."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.errors import ConfigError
from atoll.net.endpoint import Ticket
from atoll.net.proxies import at_address

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_atoll._tcp.local."

FIND_S = 3.0
"""How long to wait for answers."""

LATE_S = 12.0
"""How much longer if none has come: the hub's machine may be busy with training."""

AGAIN_S = 0.2
"""Pause between looks for a late answer."""

DIAL_S = 0.5
"""Time limit per address of a hub."""

HUB_PORT = 7700
"""Default port of a hub."""

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?"
)
_FINGERPRINT = re.compile(r"[0-9a-f]{40}")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9_.-]+)*")
_LINE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHub:
    """A hub as it announces itself, unauthenticated."""

    name: str
    host: str
    port: int
    prefix: str = ""
    secure: bool = False
    fingerprint: str = ""
    version: str = ""

    @property
    def url(self) -> str:
        """Address of the hub."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{at_address(self.host, self.port)}{self.prefix}"

    def ticket(self, secret: str, *, mark: str) -> Ticket:
        """Return a ticket for this address; the mark is never taken from the announcement."""
        return Ticket(self.host, self.port, secret, prefix=self.prefix, mark=mark)


def find_hubs(*, timeout_s: float = FIND_S) -> list[FoundHub]:
    """Return the hubs that answer in time, by name, each with a reachable address.

    If there is none, wait up to `LATE_S` longer for the first.

    Raises:
        ConfigError: there is no network.
    """
    from zeroconf import ServiceBrowser, ServiceListener, Zeroconf

    names: set[str] = set()

    class Listener(ServiceListener):
        """Collects the announced names."""

        def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.add(name)

        def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.add(name)

        def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.discard(name)

    try:
        zeroconf = Zeroconf()
    except OSError as error:
        raise ConfigError(
            "hubs cannot be looked for on this network",
            given=str(error),
            remedy="join with the whole line that `atoll up` prints for the internet",
        ) from error
    try:
        ServiceBrowser(zeroconf, SERVICE, Listener())
        time.sleep(timeout_s)
        deadline = time.monotonic() + LATE_S
        while not (found := _resolved(zeroconf, sorted(names))) and time.monotonic() < deadline:
            time.sleep(AGAIN_S)
        return found
    finally:
        zeroconf.close()


def _resolved(zeroconf: Zeroconf, names: list[str]) -> list[FoundHub]:
    found = []
    for name in names:
        info = zeroconf.get_service_info(SERVICE, name, timeout=2000)
        hub = read_service(info) if info is not None else None
        if info is not None and hub is not None:
            host = first_reachable(info.parsed_addresses(), hub.port) or hub.host
            found.append(replace(hub, host=host))
    return sorted(found, key=lambda hub: (hub.name, hub.port))


def hub_at(address: str) -> FoundHub:
    """Return the hub at HOST or HOST:PORT, of which nothing else is known.

    Raises:
        ConfigError: this is not an address.
    """
    match = _ADDRESS.fullmatch(address.strip())
    port = int((match["port"] if match else None) or HUB_PORT)
    if match is None or not 0 < port < 65_536:
        raise ConfigError(
            "this is not the address of a hub",
            given=repr(address[:100]),
            expected="HOST or HOST:PORT, e.g. 192.168.1.20",
        )
    host = match["six"] or match["host"]
    return FoundHub(name=host, host=host, port=port, secure=True)


def first_reachable(addresses: Sequence[str], port: int) -> str:
    """Return the first address that accepts connections, or an empty text.

    A hub may have addresses that only itself can reach, e.g. of its containers.
    """
    for address in addresses:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=DIAL_S).close()
            return address
    return ""


def read_service(info: ServiceInfo) -> FoundHub | None:
    """Return the hub that a service describes, or None if it is invalid.

    Anyone on the network can announce anything: every field is checked and bounded.
    """
    fields = {
        key.decode("utf-8", "replace"): (value or b"").decode("utf-8", "replace")[:200]
        for key, value in info.properties.items()
    }
    addresses = [text for text in info.parsed_addresses() if _is_address(text)]
    fingerprint, prefix = fields.get("fingerprint", ""), fields.get("prefix", "")
    known = not fingerprint or _FINGERPRINT.fullmatch(fingerprint)
    if not addresses or not info.port or not known or not _PREFIX.fullmatch(prefix):
        return None
    return FoundHub(
        name=_LINE.sub("?", fields.get("name", ""))[:60] or addresses[0],
        host=addresses[0],
        port=info.port,
        prefix=prefix,
        secure=fields.get("tls") == "1",
        fingerprint=fingerprint,
        version=_LINE.sub("?", fields.get("version", ""))[:20],
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
