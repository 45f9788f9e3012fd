"""What a hub announces to its neighbours, and that it needs no package for living without."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll import __version__
from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.discovery import MdnsAnnouncement, MdnsRegistration, addresses_of
from atoll.hub.server import HubServer

HERE = MdnsRegistration(
    host="127.0.0.1", port=7700, prefix="/atoll", secure=True, fingerprint="ab" * 20
)


def test_nothing_that_is_told_lets_anybody_in() -> None:
    properties = HERE.properties()
    assert set(properties) == {"name", "prefix", "tls", "fingerprint", "version"}
    assert (properties["tls"], properties["prefix"], properties["version"]) == (
        "1",
        "/atoll",
        __version__,
    )


def test_long_host_name_fits_into_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HERE.label.endswith("-7700")
    monkeypatch.setattr("platform.node", lambda: "h" * 64)
    assert len(HERE.label) <= 63
    assert HERE.label.endswith("h-7700")


def test_wildcard_hub_announces_dialable_addresses() -> None:
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    found = [ipaddress.ip_address(text) for text in addresses_of("0.0.0.0")]
    assert found
    assert len(found) == 1 or not any(address.is_loopback for address in found)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_host_without_ipv4_is_refused_if_asked_for(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = SimpleNamespace(family=socket.AF_INET6, address="2001:db8::1")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"e": [address], "lo": [loopback]})
    announcement = MdnsAnnouncement(dataclasses.replace(HERE, host=host))
    with pytest.raises(ConfigError, match="no IPv4 address"):
        asyncio.run(announcement.start(needed=True))
    asyncio.run(announcement.start(needed=False))


def test_a_hub_on_loopback_tells_nobody(tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "h", jobs=tmp_path / "r", reducers=False)
    with HubServer(options) as server:
        assert server.hub is not None
        assert server.hub.announcement is None
