"""The hub's keys are replaced while machines are connected; what is old ends when it should."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.errors import AtollError, AuthError, HubUnreachable
from atoll.hub.security.certificates import CA, CA_KEY, NEXT
from atoll.hub.security.tls import TlsChoice, TlsFiles
from atoll.hub.server import HubServer
from atoll.net import pinned
from atoll.net.endpoint import Ticket, parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity import join, tls_identity
from atoll.node.identity.identity import Identity
from tests.security.conftest import INFO, joined, operator, serving, until, web

HOUR_S = 3_600.0


def client_of(me: Identity) -> HubClient:
    return HubClient(me.hub, me.token, endpoint=me.endpoint)


def present_ticket(hub: HubServer) -> Ticket:
    assert hub.hub is not None
    return parse_ticket(hub.hub.ticket)


def switch(hub: HubServer) -> None:
    """Let the time of the overlap be over."""
    assert hub.hub is not None
    assert hub.hub.tls is not None
    hub.hub.tls.switch_at = 0.0
    hub.hub.tls.refresh()


def test_connected_machines_know_the_next_authority(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub, operator(hub) as boss:
        first = parse_ticket(hub.ticket)
        here = joined(hub, tmp_path / "here", name="here")
        away = joined(hub, tmp_path / "away", name="away")
        boss.rotate("authority", overlap_s=HOUR_S)
        with client_of(here) as kept:
            kept.hub()  # as every request of an agent, it pins what the hub names
            assert len(pinned.fingerprints(Path(here.ca))) == 2
            assert join.renew_if_due(here), "its certificate is of the former authority"
            assert not join.renew_if_due(here)
            late = joined(hub, tmp_path / "late", name="late")  # with the ticket so far
            switch(hub)
            assert kept.hub()["role"] == "node", "the same client goes on"
            assert not join.renew_if_due(here)
        ticket = present_ticket(hub)
        assert ticket.secret == first.secret
        assert ticket.fingerprint != first.fingerprint
        assert pinned.fingerprints(Path(here.ca)) == [ticket.fingerprint]
        assert join.known_hub(ticket, home=tmp_path / "here") is not None
        with client_of(late) as client:
            assert client.hub()["role"] == "node"
        with client_of(away) as client, pytest.raises(HubUnreachable, match="were rotated"):
            client.hub()
        assert join.known_hub(ticket, home=tmp_path / "away") is None
        again = join.enter_cluster(ticket, home=tmp_path / "away", name="away", info=INFO)
        with client_of(again) as client:
            assert client.hub()["role"] == "node"
        assert boss.hub()["role"] == "operator", "the owner's client of this machine goes on"


def test_certificate_of_the_former_authority_opens_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub, operator(hub) as boss:
        me = joined(hub, tmp_path / "home")
        old = tmp_path / "old.pem"
        old.write_bytes(Path(me.certificate).read_bytes())
        boss.rotate("authority", overlap_s=HOUR_S)
        stale = dataclasses.replace(me, certificate=str(old))
        with client_of(stale) as client:
            assert client.hub()["role"] == "node"
        assert join.renew_if_due(me)
        switch(hub)
        with client_of(stale) as client, pytest.raises(AtollError):
            client.hub()
        with client_of(me) as client:
            assert client.hub()["role"] == "node"


def test_change_that_a_crash_cut_short_is_finished(tmp_path: Path) -> None:
    own, names = TlsChoice("own"), ("localhost",)
    clock = VirtualClock()
    files = TlsFiles(own, data=tmp_path, names=names, clock=clock)
    files.rotate_authority(overlap_s=HOUR_S)
    assert files.next is not None
    new = files.next.fingerprint
    again = TlsFiles(own, data=tmp_path, names=names, clock=clock)
    assert again.next is not None
    assert again.next.fingerprint == new
    (tmp_path / "tls" / f"{NEXT}{CA_KEY}").replace(tmp_path / "tls" / CA_KEY)  # and it crashed
    third = TlsFiles(own, data=tmp_path, names=names, clock=clock)
    assert third.next is None
    assert third.authority.fingerprint == new
    assert not (tmp_path / "tls" / f"{NEXT}{CA}").exists()
    clock.advance(2 * HOUR_S)
    assert TlsFiles(own, data=tmp_path, names=names, clock=clock).named == new


def test_overlap_ends_by_itself_also_over_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub, operator(hub) as boss:
        boss.rotate("authority", overlap_s=1.0)
        before = parse_ticket(hub.ticket).fingerprint
        until(lambda: present_ticket(hub).fingerprint != before)
        after = present_ticket(hub).fingerprint
    with serving(tmp_path, tls="on") as hub:
        assert parse_ticket(hub.ticket).fingerprint == after


def test_new_certificate_of_the_hub_disturbs_nobody(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub, operator(hub) as boss:
        me = joined(hub, tmp_path / "home")
        with client_of(me) as client:
            client.hub()
            assert boss.rotate("certificate", overlap_s=0.0)["ends"] > 0
            assert client.hub()["role"] == "node"
        with client_of(me) as client:
            assert client.hub()["role"] == "node"
        assert len(boss.keys()["authorities"]) == 1


def test_operator_token_is_replaced_with_an_overlap(tmp_path: Path) -> None:
    with serving(tmp_path) as hub, operator(hub) as boss:
        second = boss.rotate("operator", overlap_s=HOUR_S)["token"]
        for token in (hub.operator_token, second):
            with web(hub, token) as client:
                assert client.get("/api/jobs").status_code == 200
        first = hub.operator_token
    with serving(tmp_path) as hub:
        assert hub.operator_token == second
        with web(hub, first) as client:
            assert client.get("/api/jobs").status_code == 200, "the overlap outlives a restart"
        with operator(hub) as boss:
            third = boss.rotate("operator", overlap_s=0.0)["token"]
        for token, status in ((first, 401), (second, 401), (third, 200)):
            with web(hub, token) as client:
                assert client.get("/api/jobs").status_code == status


def test_members_keep_their_key_when_the_token_changes(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        assert hub.hub is not None
        auth = hub.hub.stores.auth
        key = auth.key_of_members("job")
        hub.call(auth.rotate_operator(overlap_s=0.0))
        assert auth.key_of_members("job") == key
        with pytest.raises(AuthError):
            auth.authenticate(hub.operator_token)


def test_what_the_hub_names_is_not_believed_without_proof(tmp_path: Path) -> None:
    with serving(tmp_path, tls="on") as hub:
        me = joined(hub, tmp_path / "home")
        path, known = Path(me.ca), pinned.fingerprints(Path(me.ca))
        text = path.read_text(encoding="ascii")
        other = "0" * pinned.FINGERPRINT_DIGITS
        for named in ("", "nothing", f"{known[0]},{other}", other):
            assert not pinned.follow(path, named, fetch=lambda _: text)
        assert path.read_text(encoding="ascii") == text
        assert tls_identity.is_of(me.certificate, ca=me.ca)
