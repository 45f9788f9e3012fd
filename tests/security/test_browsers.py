"""What pages of other sites can do with a login that a browser keeps: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from atoll.errors import AuthError
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from tests.security.conftest import SPEC, login, operator, serving, stores_of, web

BODY = {"spec": SPEC}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with serving(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def browser(hub: HubServer) -> Iterator[httpx.Client]:
    """A browser that is logged in."""
    with web(hub) as client:
        moved = client.get("/", params={"token": hub.operator_token})
        assert moved.status_code == 303
        yield client


def own(hub: HubServer, **more: str) -> dict[str, str]:
    """Return what a browser adds for the hub's own page."""
    return {"origin": hub.url, "sec-fetch-site": "same-origin", **more}


def test_the_page_itself_may_act(hub: HubServer, browser: httpx.Client) -> None:
    assert browser.post("/api/jobs", json=BODY, headers=own(hub)).status_code == 201
    same = {"sec-fetch-site": "same-origin"}
    assert browser.post("/api/jobs", json=BODY, headers=same).status_code == 201


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "https://evil.example:7700"},
        {"origin": "null"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "http://127.0.0.1.evil.example"},
    ],
)
def test_pages_of_other_sites_may_not(browser: httpx.Client, headers: dict[str, str]) -> None:
    assert browser.post("/api/jobs", json=BODY, headers=headers).status_code == 403
    foreign = headers not in ({}, {"sec-fetch-site": "none"}, {"origin": "null"})
    if foreign:
        assert browser.get("/api/jobs", headers=headers).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_form_can_send_is_not_taken(
    hub: HubServer, browser: httpx.Client, kind: str
) -> None:
    headers = own(hub, **{"content-type": kind} if kind else {})
    answer = browser.post("/api/jobs", content=b'{"spec": ""}', headers=headers)
    assert answer.status_code == 403
    assert "JSON" in answer.text


def test_a_form_of_another_site_can_neither_log_in_nor_out(
    hub: HubServer, browser: httpx.Client
) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        for path in ("/login", "/logout"):
            assert browser.post(path, data={"token": "x"}, headers=headers).status_code == 403
    hidden = {"origin": "null", "sec-fetch-site": "same-origin"}  # a page that says no-referrer
    done = browser.post("/login", data={"token": hub.operator_token}, headers=hidden)
    assert done.status_code == 303


def test_a_token_in_the_address_is_gone_after_the_login(hub: HubServer) -> None:
    with web(hub) as client:
        moved = client.get("/", params={"token": hub.operator_token})
        assert "token" not in moved.headers["location"]
        cookie = moved.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite" in cookie
        assert client.get("/api/jobs", params={"token": hub.operator_token}).status_code == 200
    with web(hub) as client:
        assert client.get("/api/jobs", params={"token": hub.operator_token}).status_code == 401


def secret_of(client: httpx.Client) -> str:
    (value,) = client.cookies.values()
    return value


def test_cookie_is_no_token_and_ends_with_the_logout(hub: HubServer) -> None:
    """Every port of a host gets its cookies: another program there must not become operator."""
    with web(hub) as client:
        client.get("/", params={"token": hub.operator_token})
        secret = secret_of(client)
        assert secret != hub.operator_token
        with web(hub, secret) as thief:
            assert thief.get("/api/jobs").status_code == 401
        cookies = dict.fromkeys(client.cookies, hub.operator_token)
        with web(hub, cookies=cookies) as token_as_cookie:
            assert token_as_cookie.get("/api/jobs").status_code == 401
        with web(hub, cookies=dict(client.cookies)) as copy:
            assert copy.get("/api/jobs").status_code == 200
            assert client.post("/logout", headers=own(hub)).status_code == 303
            assert copy.get("/api/jobs").status_code == 401
            assert copy.post("/api/jobs", json=BODY, headers=own(hub)).status_code == 401


def test_login_of_a_browser_lasts_over_restarts_until_revoked(tmp_path: Path) -> None:
    with serving(tmp_path) as hub:
        token = login(hub, "viewer", name="vera")
        with web(hub) as client:
            client.get("/", params={"token": token})
            secret = secret_of(client)
    with serving(tmp_path) as hub:
        auth = stores_of(hub).auth
        assert auth.authenticate_browser(secret).name == "vera"
        hub.call(auth.log_out(auth.authenticate(token)))
        with pytest.raises(AuthError, match="not logged in"):
            auth.authenticate_browser(secret)


def test_links_of_other_sites_log_nobody_in(hub: HubServer) -> None:
    with operator(hub) as client:
        ticket = parse_ticket(client.create_ticket(role="viewer", uses=1)).secret
    for given in ({"token": hub.operator_token}, {"ticket": ticket}):
        with web(hub) as client:
            answer = client.get("/", params=given, headers={"sec-fetch-site": "cross-site"})
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
    with web(hub) as client:  # the ticket is not used up
        assert client.get("/", params={"ticket": ticket}).status_code == 303


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1"])
def test_pages_of_other_sites_open_no_socket(hub: HubServer, origin: str) -> None:
    address = hub.url.replace("http", "ws") + "/ws"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, additional_headers={"Origin": origin})
    assert refused.value.response.status_code == 403
    with connect(address, additional_headers={"Origin": hub.url}):
        pass


def test_cookie_is_never_sent_in_clear_under_tls(secure: HubServer) -> None:
    with web(secure) as client:
        moved = client.get("/", params={"token": secure.operator_token})
        assert "secure" in moved.headers["set-cookie"].lower().replace(" ", "").split(";")


def test_nobody_can_frame_a_page_or_guess_its_kind(hub: HubServer, browser: httpx.Client) -> None:
    paths = ["/", "/login", "/static/style.css", "/api/jobs", "/api/hub", "/nothing", "/healthz"]
    for path in paths:
        headers = browser.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers


def test_the_page_runs_the_hubs_own_scripts_only(hub: HubServer, browser: httpx.Client) -> None:
    policy = browser.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";") if rule.strip())
    assert rules["default-src"] == "'self'"
    scripts = rules.get("script-src", rules["default-src"])
    assert "unsafe" not in scripts
    assert "http" not in policy


def test_html_that_a_job_left_cannot_act_as_its_reader(
    hub: HubServer, browser: httpx.Client
) -> None:
    with operator(hub) as client:
        job = client.submit(SPEC)
        client.put_file(job, "report.html", b"<script>fetch('/api/jobs')</script>")
    answer = browser.get(f"/api/jobs/{job}/files/report.html")
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    # What runs in a sandbox has no origin: the browser says so, and the hub refuses it.
    headers = {"origin": "null", "sec-fetch-site": "cross-site"}
    assert browser.get("/api/jobs", headers=headers).status_code == 403


def test_viewers_log_in_at_the_page_and_cannot_act(hub: HubServer) -> None:
    with web(hub) as client:
        moved = client.get("/", params={"token": login(hub, "viewer", name="vera")})
        assert moved.status_code == 303
        assert "<main" in client.get("/").text
        assert client.get("/api/jobs").status_code == 200
        assert client.post("/api/jobs", json=BODY, headers=own(hub)).status_code == 403


@pytest.mark.parametrize("role", ["node", "job"])
def test_machines_do_not_log_in_at_the_page(hub: HubServer, role: str) -> None:
    auth = stores_of(hub).auth
    token = hub.call(auth.issue_job_token("some-job")) if role == "job" else node_token(hub)
    with web(hub) as client:
        assert client.get("/", params={"token": token}).status_code == 401


def node_token(hub: HubServer) -> str:
    secret = hub.ticket.rpartition("/")[2]
    return hub.call(stores_of(hub).auth.redeem(secret, name="box"))[1]


def test_two_hubs_of_one_machine_do_not_share_a_cookie(hub: HubServer) -> None:
    with web(hub) as client:
        client.get("/", params={"token": hub.operator_token})
        assert [cookie.name for cookie in client.cookies.jar] == [f"atoll_{hub.port}"]
