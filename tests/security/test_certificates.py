"""The hub's authority and its certificate: names, renewal, damage, one from elsewhere."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from atoll.clock import RealClock, VirtualClock
from atoll.errors import AtollError
from atoll.hub.security.certificates import Authority, own_names
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from atoll.node.identity import tls_identity
from tests.security.conftest import INFO, operator, raw, serving

DAY_S = 86_400.0


def test_hub_renews_its_certificate_in_time(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    authority = Authority(tmp_path, clock=clock)
    assert authority.refresh(["hub.example", "10.0.0.1"])
    assert not authority.refresh(["10.0.0.1", "hub.example"])
    assert authority.refresh(["hub.example", "10.0.0.2"])
    clock.advance(200 * DAY_S)
    assert not authority.refresh(["hub.example", "10.0.0.2"])
    clock.advance(60 * DAY_S)
    assert authority.refresh(["hub.example", "10.0.0.2"])
    assert Authority(tmp_path, clock=clock).fingerprint == authority.fingerprint


def test_new_connections_get_a_renewed_certificate(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub:
        assert hub.hub is not None
        assert hub.hub.tls is not None
        before = served(hub)
        hub.hub.tls.refresh()
        assert served(hub) == before
        hub.hub.tls.authority.certificate.unlink()
        hub.hub.tls.refresh()
        assert served(hub) != before


def served(hub: HubServer) -> bytes | None:
    """Return the certificate that the hub shows."""
    with raw(hub, tls=True) as opened:
        assert isinstance(opened, ssl.SSLSocket)
        return opened.getpeercert(binary_form=True)


def test_own_names_are_every_address_and_what_is_advertised() -> None:
    names = own_names("hub.example", "", "0.0.0.0")
    assert {"localhost", "127.0.0.1", "hub.example", socket.gethostname()} <= set(names)
    assert "0.0.0.0" not in names


def test_damaged_authority_is_said_with_a_remedy(tmp_path: Path) -> None:
    Authority(tmp_path, clock=VirtualClock())
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(AtollError, match="every node then has to join again"):
        Authority(tmp_path, clock=VirtualClock())


def test_certificate_from_elsewhere_is_served_and_trusted_here(tmp_path: Path) -> None:
    bought = Authority(tmp_path / "bought", clock=RealClock())
    bought.refresh(["localhost", "127.0.0.1"])
    files = f"{bought.certificate}:{bought.certificate}"
    with serving(tmp_path, tls=files) as hub:
        assert hub.ticket.endswith("~tls")
        assert hub.ca == str(bought.certificate)
        with operator(hub) as client:
            assert client.jobs() == []
        ticket = parse_ticket(hub.ticket)
        request = key_and_request(tmp_path / "node.key")
        with operator(hub) as client:
            joined = client.join(ticket.secret, name="box", info=INFO, request=request)
        assert "CERTIFICATE" in joined.certificate  # of the hub's own authority


def key_and_request(path: Path) -> str:
    tls_identity.make_key(path)
    return tls_identity.signing_request(path)
