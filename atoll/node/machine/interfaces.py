"""By which address and interface of this machine the others of an island meet it."""

from __future__ import annotations

import ipaddress
import socket
import sys

import psutil

from atoll.net.proxies import at_address, hub_address

MOST = 6
"""Addresses that are told at most: they are dialled one after the other."""

TRY_S = 1.0

ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way to it is the way to everywhere."""


def is_loopback(address: str) -> bool:
    """Return whether an address is one by which no other machine comes here."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_towards(host: str, port: int) -> str:
    """Return this machine's address towards another; empty: there is no way. Nothing is sent."""
    from atoll.node.machine.bandwidth import own_address

    return own_address(f"http://{at_address(host, port)}")


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty: it is not of this machine."""
    if is_loopback(address):
        return {"linux": "lo", "darwin": "lo0"}.get(sys.platform, "")
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return ""


def meeting_addresses(hub: str) -> list[str]:
    """Return the addresses of this machine at which others of a job may dial it, the best first.

    It is the one by which this machine reaches the hub, or, where only a proxy knows the way to
    that, any other network. A hub on this very machine is reached by
    loopback, which says nothing of where others are: then those follow at which the hub itself
    answers, since by them the others come to it.

    Args:
        hub: URL of the hub.
    """
    place = hub_address(hub)
    towards = address_towards(place.host, place.port) or address_towards(ELSEWHERE, 80)
    if not towards or not is_loopback(towards):
        return [towards] if towards else []
    return [towards, *(one for one in _own_addresses() if _answers(one, place.port))][:MOST]


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine besides loopback."""
    return [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]


def _answers(address: str, port: int) -> bool:
    """Return whether anybody listens there; of one's own machine one hears at once."""
    try:
        with socket.create_connection((address, port), timeout=TRY_S):
            return True
    except OSError:
        return False
