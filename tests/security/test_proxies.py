"""A hub behind a reverse proxy: whom it believes about addresses and schemes."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.hub.security.forwarded import MAX_HOPS, TrustedProxies
from atoll.hub.security.tickets import ticket_text
from atoll.hub.server import HubServer
from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from tests.security.conftest import INFO, operator, serving, web


def seen(proxies: TrustedProxies, client: str, *lines: str, proto: str = "") -> tuple[str, str]:
    """Return address and scheme that the hub sees."""
    headers = [(b"x-forwarded-for", line.encode()) for line in lines]
    if proto:
        headers.append((b"x-forwarded-proto", proto.encode()))
    scope = {"type": "http", "client": (client, 1), "scheme": "http", "headers": headers}
    proxies.look_behind(scope)
    return scope["client"][0], str(scope["scheme"])  # type: ignore[return-value]


def test_nobody_is_believed_who_was_not_named() -> None:
    assert seen(TrustedProxies(), "127.0.0.1", "1.2.3.4", proto="https") == ("127.0.0.1", "http")
    named = TrustedProxies(["10.0.0.0/8"])
    assert seen(named, "192.168.0.1", "1.2.3.4", proto="https") == ("192.168.0.1", "http")


def test_a_named_proxy_tells_address_and_scheme() -> None:
    named = TrustedProxies(["127.0.0.1", "10.0.0.0/8"])
    assert seen(named, "127.0.0.1", "1.2.3.4", proto="https") == ("1.2.3.4", "https")
    assert seen(named, "::ffff:127.0.0.1", "1.2.3.4") == ("1.2.3.4", "http")


def test_what_the_client_wrote_itself_does_not_count() -> None:
    named = TrustedProxies(["10.0.0.0/8"])
    assert seen(named, "10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.2")[0] == "1.2.3.4"
    assert seen(named, "10.0.0.1", "6.6.6.6", "1.2.3.4")[0] == "1.2.3.4"
    assert seen(named, "10.0.0.1", "6.6.6.6, nonsense, 10.0.0.2")[0] == "10.0.0.2"
    many = ", ".join(["6.6.6.6"] + ["10.0.0.9"] * (MAX_HOPS + 5))
    assert seen(named, "10.0.0.1", many)[0] == "10.0.0.9"


def test_a_wrong_address_of_a_proxy_is_told() -> None:
    with pytest.raises(ConfigError, match="not the address of a proxy"):
        TrustedProxies(["nginx"])


def test_guessing_behind_a_proxy_counts_by_client_address(tmp_path: Path) -> None:
    with serving(tmp_path, trust_proxy=("127.0.0.1",)) as hub:
        guesser = {"x-forwarded-for": "6.6.6.6"}
        with web(hub, "guess") as client:
            statuses = [client.get("/api/jobs", headers=guesser).status_code for _ in range(12)]
            assert statuses[-1] == 429
            honest = client.get("/api/jobs", headers={"x-forwarded-for": "1.2.3.4"})
            assert honest.status_code == 401
        with operator(hub) as client:
            assert "6.6.6.6" in {row["address"] for row in client.audit()}


def test_an_address_cannot_be_forged_without_a_proxy(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        with web(hub, "guess") as client:
            for number in range(12):
                header = {"x-forwarded-for": f"6.6.6.{number}"}
                status = client.get("/api/jobs", headers=header).status_code
            assert status == 429
        with operator(hub) as client:
            assert {row["address"] for row in client.audit()} == {"127.0.0.1"}


def test_cookies_are_for_tls_where_the_proxy_speaks_it(tmp_path: Path) -> None:
    with serving(tmp_path, trust_proxy=("127.0.0.1",)) as hub, web(hub) as browser:
        told = {"x-forwarded-proto": "https", "x-forwarded-for": "1.2.3.4"}
        moved = browser.get("/", params={"token": hub.operator_token}, headers=told)
        assert "secure" in moved.headers["set-cookie"].lower().replace(" ", "").split(";")


def test_behind_a_proxy_a_token_alone_opens_a_node(tmp_path: Path) -> None:
    """The proxy ends TLS, so no certificate can reach the hub."""
    with serving(tmp_path, tls="on", trust_proxy=("127.0.0.1",)) as hub:
        assert node_gets(hub) == "node"


def node_gets(hub: HubServer) -> str:
    with operator(hub) as client:
        token = client.join(parse_ticket(hub.ticket).secret, name="box", info=INFO).token
    with HubClient(hub.url, token, endpoint=HubEndpoint(ca=hub.ca)) as node:
        return str(node.hub()["role"])


@pytest.mark.parametrize(
    ("advertise", "mark", "text"),
    [
        ("", "", "atoll://10.0.0.1:7700/s"),
        ("", "f" * 40, f"atoll://10.0.0.1:7700/s~{'f' * 40}"),
        ("hub.example", "", "atoll://hub.example:7700/s"),
        ("hub.example:80", "", "atoll://hub.example:80/s"),
        ("fe80::1", "", "atoll://[fe80::1]:7700/s"),
        ("https://hub.example/atoll/", "", "atoll://hub.example:443/atoll/s~tls"),
        ("https://hub.example:8443", "f" * 40, "atoll://hub.example:8443/s~tls"),
        ("http://hub.example/a/b", "", "atoll://hub.example:80/a/b/s"),
    ],
)
def test_tickets_name_what_is_advertised(advertise: str, mark: str, text: str) -> None:
    made = ticket_text("http://10.0.0.1:7700", "s", advertise=advertise, mark=mark)
    assert made == text
    assert str(parse_ticket(made)) == text


@pytest.mark.parametrize("advertise", ["ftp://x", "https://", "https://h/?q=1", "h:port"])
def test_what_cannot_be_advertised_is_told(advertise: str) -> None:
    with pytest.raises(ConfigError, match="cannot be advertised"):
        ticket_text("http://10.0.0.1:7700", "s", advertise=advertise)
