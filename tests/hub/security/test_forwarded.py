"""A hub below a path."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.security.forwarded import check_prefix, forwarded_address, without_prefix
from atoll.hub.server import HubServer
from atoll.net.handshake import make_hello
from atoll.net.http.client import HubClient
from atoll.net.sync_link import connect
from atoll.wire.messages import Beat, Done
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("given", "prefix"), [("", ""), ("/", ""), ("atoll", "/atoll"), ("/a/b.c/", "/a/b.c")]
)
def test_prefixes_have_one_form(given: str, prefix: str) -> None:
    assert check_prefix(given) == prefix


@pytest.mark.parametrize("given", ["/a b", "/a?b", "//x//y", "/%2e"])
def test_what_cannot_be_a_path_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="/atoll"):
        check_prefix(given)


@pytest.mark.parametrize(
    ("advertise", "prefix", "expected"),
    [
        ("", "", ("", "")),
        ("host", "/atoll", ("host", "/atoll")),
        ("https://host/atoll", "", ("https://host/atoll", "/atoll")),
        ("https://host", "/atoll", ("https://host/atoll", "/atoll")),
        ("https://host/outside", "/inside", ("https://host/outside", "/inside")),
    ],
)
def test_what_tickets_tell_and_what_requests_have(
    advertise: str, prefix: str, expected: tuple[str, str]
) -> None:
    assert forwarded_address(advertise, prefix) == expected


def test_only_whole_parts_of_a_path_count() -> None:
    scope = {"path": "/atoll/api/hub", "raw_path": b"/atoll/api/hub"}
    assert without_prefix(scope, "/atoll") == {"path": "/api/hub", "raw_path": b"/api/hub"}
    assert without_prefix({"path": "/atoll"}, "/atoll")["path"] == "/"
    for other in ({"path": "/atollo/api"}, {"path": "/api/hub"}, {"type": "lifespan"}):
        assert without_prefix(other, "/atoll") == other


def test_a_hub_answers_with_and_without_its_prefix(tmp_path: Path) -> None:
    options = HubOptions(
        data=tmp_path / "hub", jobs=tmp_path / "runs", reducers=False,
        advertise="https://hub.example/atoll",
    )  # fmt: skip
    with HubServer(options) as hub:
        assert hub.ticket.startswith("atoll://hub.example:443/atoll/")
        for url in (hub.url, f"{hub.url}/atoll"):
            with HubClient(url, hub.operator_token) as client:
                client.health()
                assert client.hub()["version"]
            with connect(url, make_hello("p/w0", hub.operator_token)) as link:
                assert isinstance(link.request(Beat(), timeout_s=PATIENCE_S), Done)
        for path, status in (("/atoll", 200), ("/atoll/", 200), ("/atollo/", 401)):
            answer = httpx.get(
                f"{hub.url}{path}", trust_env=False, follow_redirects=True, timeout=PATIENCE_S
            )
            assert answer.status_code == status
