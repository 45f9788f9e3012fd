"""Which hub a command speaks to."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.known_hub import KnownHub, find, remember
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


def test_joining_the_own_hub_does_not_lose_the_operators_token(tmp_path: Path) -> None:
    remember(SECOND, home=tmp_path)
    remember(KnownHub("http://b:2", "of-a-node"), home=tmp_path)
    assert find(home=tmp_path) == SECOND


def test_no_hub_and_unknown_hub_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"atoll hub.*--local"):
        find(home=tmp_path)
    remember(FIRST, home=tmp_path)
    with pytest.raises(AuthError, match=r"no token for that hub.*--hub atoll://"):
        find("http://c:3", home=tmp_path)


def test_ticket_lets_a_command_in_without_serving_as_a_node(tmp_path: Path) -> None:
    with HubServer(HubOptions(data=tmp_path / "hub", jobs=tmp_path / "runs")) as server:
        hub = find(server.ticket, home=tmp_path / "home")
        with hub.client() as client:
            assert client.jobs() == []
            assert client.nodes() == []
        assert find(server.ticket, home=tmp_path / "home") == hub
