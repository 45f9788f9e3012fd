"""Which hub a command speaks to."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.hub_access import ALONE, KnownHub, find, forget, remember
from atoll.errors import AuthError, ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer

FIRST = KnownHub("http://a:1", "token-a")
SECOND = KnownHub("http://b:2", "token-b", operator=True)


def test_last_hub_is_the_default_and_others_are_found_by_url(tmp_path: Path) -> None:
    remember(FIRST, home=tmp_path)
    remember(SECOND, home=tmp_path)
    assert find(home=tmp_path) == SECOND
    assert find("http://a:1/", home=tmp_path) == FIRST
    assert find("a:1", home=tmp_path) == FIRST


def test_viewer_login_keeps_the_operators_token(tmp_path: Path) -> None:
    remember(SECOND, home=tmp_path)
    remember(KnownHub("http://b:2", "of-a-viewer"), home=tmp_path)
    assert find(home=tmp_path) == SECOND


def test_hub_with_tls_is_found_by_its_bare_address_too(tmp_path: Path) -> None:
    known = KnownHub("https://c:3", "token-c", ca="/ca.pem")
    remember(known, home=tmp_path)
    assert find("c:3", home=tmp_path) == known


def test_a_hub_that_is_forgotten_is_not_found(tmp_path: Path) -> None:
    remember(FIRST, home=tmp_path)
    remember(SECOND, home=tmp_path)
    forget(SECOND, home=tmp_path)
    assert find(home=tmp_path) == FIRST


def test_no_hub_and_unknown_hub_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"atoll hub.*ticket new --role operator"):
        find(home=tmp_path)
    remember(FIRST, home=tmp_path)
    with pytest.raises(AuthError, match=r"no login at that hub.*ticket new --role operator"):
        find("http://c:3", home=tmp_path)


def test_only_an_operators_ticket_permits_commands(tmp_path: Path) -> None:
    home = tmp_path / "home"
    options = HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs", tls="on", reducers=False)
    with HubServer(options) as server:
        own = KnownHub(server.url, server.operator_token, operator=True, ca=server.ca)
        with pytest.raises(AuthError, match=r"not for a login.*--role operator"):
            find(server.ticket, home=home)
        with own.client() as client:
            ticket = client.create_ticket(role="operator", uses=1)
        hub = find(ticket, home=home)
        assert hub.operator
        with hub.client() as client:
            assert client.jobs() == []
            assert client.nodes() == []
        assert find(ticket, home=home) == hub
    assert (home / "hubs.json").stat().st_mode & 0o077 == 0


def test_without_a_hub_only_what_the_command_can_do_is_advised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as status:
        find(home=tmp_path)
    assert "--local" not in status.value.message()
    with pytest.raises(ConfigError, match="; or use --local N for a run on this machine alone"):
        find(home=tmp_path, without=ALONE)
