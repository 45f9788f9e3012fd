"""Addresses and interfaces of this machine for the other hosts of an island."""

from __future__ import annotations

import ipaddress
import socket
import sys

import psutil

from atoll.net.proxies import at_address, hub_address

MOST = 6
"""Addresses published at most: they are tried one after the other."""

TRY_S = 1.0

ELSEWHERE = "192.0.2.1"
"""A documentation address (RFC 5737), used to find the interface of the default route."""


def is_loopback(address: str) -> bool:
    """Return whether other machines cannot reach this address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_towards(host: str, port: int) -> str:
    """Return this machine's local address on the route to a host, or ""; nothing is sent."""
    from atoll.node.machine.bandwidth import own_address

    return own_address(f"http://{at_address(host, port)}")


def interface_of(address: str) -> str:
    """Return the name of the interface with an address, or ""."""
    if is_loopback(address):
        return {"linux": "lo", "darwin": "lo0"}.get(sys.platform, "")
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return ""


def meeting_addresses(hub: str) -> list[str]:
    """Return the addresses at which other hosts may reach this one, the best first.

    It is the local address on the route to the hub or, if only a proxy can reach that, on the
    default route. If the hub runs on this machine, addresses on which the hub listens are appended,
    since peers can reach those.
    """
    target = hub_address(hub)
    towards = address_towards(target.host, target.port) or address_towards(ELSEWHERE, 80)
    if not towards or not is_loopback(towards):
        return [towards] if towards else []
    return [towards, *(one for one in _own_addresses() if _answers(one, target.port))][:MOST]


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine except loopback."""
    return [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=TRY_S):
            return True
    except OSError:
        return False
