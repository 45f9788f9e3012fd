"""Which members can be dialled: own address, and a quick look at everybody else's."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from atoll.errors import ConfigError, HubUnreachable

PROBE_TIMEOUT_S = 2.0


def own_address(url: str) -> str:
    """Return this machine's address as it is used towards the hub; nothing is sent.

    Other members that reach the hub over the same network can most likely dial it, whatever
    this machine's hostname resolves to.

    Args:
        url: The hub's, http://HOST:PORT.

    Raises:
        ConfigError: the URL names no host.
        HubUnreachable: there is no way to the host.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError("the hub's URL names no host", given=url, expected="http://HOST:PORT")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HubUnreachable("there is no route to the hub", given=f"{url} ({error})") from error


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(dial: str) -> tuple[str, int]:
    """Return the two parts of ``host:port``.

    Raises:
        ConfigError: there is no port in it.
    """
    host, _, port = dial.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("this is not an address", given=dial, expected="HOST:PORT")
    return host.strip("[]"), int(port)


def answers(dial: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return whether a TCP connection to ``host:port`` can be made."""
    try:
        with socket.create_connection(split_host_port(dial), timeout=timeout_s):
            return True
    except (OSError, ConfigError):
        return False


def probe(dials: Mapping[str, Sequence[str]], *, timeout_s: float = PROBE_TIMEOUT_S) -> list[str]:
    """Return the members of whose addresses at least one answers, asking all at once.

    Args:
        dials: Member -> its addresses; none means it cannot be dialled.
        timeout_s: Longest wait for each.
    """
    asked = [(member, dial) for member, entries in dials.items() for dial in entries]
    if not asked:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(asked)), thread_name_prefix="probe") as pool:
        found = pool.map(lambda pair: answers(pair[1], timeout_s=timeout_s), asked)
        reached = {member for (member, _), answer in zip(asked, found, strict=True) if answer}
    return [member for member in dials if member in reached]
