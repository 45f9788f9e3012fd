"""Who may do what over REST: every address, every role, every method, against a written table.

A new address without a line here fails, so that nobody adds one without a decision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.routing import Route

from atoll.hub.http.endpoint import Endpoint
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from tests.security.conftest import INFO, SPEC, login, operator, serving, stores_of, web

ALL = "stranger operator viewer node job other program"
"""`job` is a process of the job in the address, `other` one of another job."""

TABLE = {
    "GET /": ALL,
    "POST /login": ALL,
    "POST /logout": ALL,
    "GET /static/{name:path}": ALL,
    "GET /healthz": ALL,
    "GET /ca.pem": ALL,
    "POST /api/join": ALL,
    "POST /api/login": ALL,
    "POST /api/pair": ALL,
    "POST /api/pair/finish": ALL,
    "GET /api/pairing": "operator",
    "POST /api/pairing": "operator",
    "POST /api/logout": "operator viewer program",
    "POST /api/renew": "node",
    "GET /api/tickets": "operator",
    "POST /api/tickets": "operator",
    "POST /api/tickets/{ticket}/revoke": "operator",
    "GET /api/keys": "operator",
    "POST /api/keys/rotate": "operator",
    "GET /api/secrets": "operator",
    "PUT /api/secrets/{name}": "operator",
    "DELETE /api/secrets/{name}": "operator",
    "GET /api/jobs/{job}/secrets": "job",
    "GET /api/limits": "operator viewer",
    "GET /api/audit": "operator",
    "GET /metrics": "operator viewer",
    "GET /api/hub": "operator viewer node job other",
    "GET /api/events": "operator viewer",
    "GET /api/history": "operator viewer",
    "GET /api/stream": "operator viewer",
    "GET /api/speed": "operator viewer node job other",
    "POST /api/speed": "operator node job other",
    "GET /api/nodes": "operator viewer",
    "POST /api/nodes/{node}/drain": "operator",
    "POST /api/nodes/{node}/revoke": "operator",
    "GET /api/jobs": "operator viewer",
    "POST /api/jobs": "operator",
    "GET /api/jobs/{job}": "operator viewer job",
    "GET /api/jobs/{job}/metrics": "operator viewer job",
    "GET /api/jobs/{job}/events": "operator viewer job",
    "GET /api/jobs/{job}/rounds": "operator viewer job",
    "GET /api/jobs/{job}/logs": "operator viewer job",
    "GET /api/jobs/{job}/worth": "operator viewer job",
    "GET /api/jobs/{job}/plan": "operator viewer",
    "POST /api/plan": "operator",
    "DELETE /api/jobs/{job}": "operator",
    "GET /api/jobs/{job}/size": "operator viewer",
    "POST /api/jobs/{job}/stop": "operator",
    "POST /api/jobs/{job}/resume": "operator",
    "POST /api/jobs/{job}/nodes": "operator",
    "GET /api/jobs/{job}/files": "operator viewer job",
    "GET /api/jobs/{job}/files/{path:path}": "operator viewer job",
    # A node may bring back artifacts of members that were placed on it, and nothing else.
    "PUT /api/jobs/{job}/files/{path:path}": "operator job",
    # For the launches of one member and its followers alone: see
    # tests/hub/scheduler/test_rendezvous.py.
    "GET /api/jobs/{job}/rendezvous/{member}": "",
    "PUT /api/jobs/{job}/rendezvous/{member}": "",
    # A node gets the code of the jobs that run on it; see tests/hub/storage/test_blobs.py.
    "GET /api/blobs/{sha256}": "operator job other program",
    "PUT /api/blobs/{sha256}": "operator node job other program",
    "GET /api/alarms": "operator viewer",
    "POST /api/alarms/{alarm}/silence": "operator",
    "GET /api/queues": "operator viewer",
    "GET /api/queues/dead": "operator viewer node job other program",
    "POST /api/queues/open": "operator job other program",
    "POST /api/queues/put": "operator node job other program",
    "POST /api/queues/put_many": "operator node job other program",
    "POST /api/queues/ack_many": "operator node job other program",
    "POST /api/queues/claim": "operator node job other program",
    "POST /api/queues/ack": "operator node job other program",
    "POST /api/queues/extend": "operator node job other program",
    "POST /api/queues/release": "operator node job other program",
    "POST /api/topics/publish": "operator job other program",
    "POST /api/topics/read": "operator job other program",
    "POST /api/topics/ack": "operator job other program",
    "GET /api/jobs/{job}/verification": "operator viewer",
    "GET /api/jobs/{job}/verification/{challenge}/{position}": "job",
    "PUT /api/jobs/{job}/verification/{challenge}/{position}": "job",
    "POST /api/queues/requeue": "operator",
    "POST /api/queues/discard": "operator",
}
"""Address and method to the roles that get past the door."""

ENTERING = ("/", "/login", "/api/login", "/api/join")
"""Open to everybody; they answer 401 themselves when what is brought opens nothing."""

METHODS = ("GET", "PUT", "DELETE", "PATCH", "POST")

VALUES = {
    "ticket": "0" * 10, "node": "nobody", "name": "style.css", "sha256": "0" * 64,
    "path": "note.txt", "alarm": "none", "member": "w0",
    "challenge": "1", "position": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with serving(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(scope="module")
def job(hub: HubServer) -> str:
    with operator(hub) as client:
        return client.submit(SPEC)


@pytest.fixture
def tokens(hub: HubServer, job: str) -> dict[str, str]:
    auth = stores_of(hub).auth
    with operator(hub) as client:
        other = client.submit(SPEC)
        joined = client.join(parse_ticket(hub.ticket).secret, name="box", info=INFO)
    return {
        "stranger": "",
        "operator": hub.operator_token,
        "viewer": login(hub, "viewer"),
        "node": joined.token,
        "program": login(hub, "program"),
        "job": hub.call(auth.issue_job_token(job)),
        "other": hub.call(auth.issue_job_token(other)),
    }


def addresses(hub: HubServer) -> dict[str, Endpoint]:
    """Return every address of the hub but the one that stands for all others."""
    assert hub.hub is not None
    web: object = hub.hub._web
    routes = web._app.routes  # type: ignore[attr-defined]
    found = {}
    for route in routes:
        assert isinstance(route, Route)
        assert isinstance(route.app, Endpoint)
        found[route.path] = route.app
    return {path: app for path, app in found.items() if path != "/{path:path}"}


def test_role_table_covers_every_address(hub: HubServer) -> None:
    known = {
        f"{method} {path}"
        for path, app in addresses(hub).items()
        for method in app._handlers
        if method != "HEAD"
    }
    assert known - set(TABLE) == set(), "decide who may do this, and write it into the table"
    assert set(TABLE) - known == set(), "the table speaks of what is not there"


@pytest.mark.parametrize("role", ALL.split())
def test_each_role_has_exactly_the_tables_permissions(
    hub: HubServer, job: str, tokens: dict[str, str], role: str
) -> None:
    wrong = []
    own = queue_of(hub, tokens[role])
    with web(hub, tokens[role]) as client:
        for template in sorted(addresses(hub), key=lambda path: path == "/api/logout"):
            path = address_of(template, {**VALUES, "job": job})
            for method in METHODS:
                with client.stream(method, path, params={"queue": own}, json={}) as answer:
                    status = answer.status_code
                allowed = TABLE.get(f"{method} {template}")
                if allowed is None:
                    right = status in ((405,) if tokens[role] else (401, 405))
                else:
                    inside = status not in (401, 403) or template in ENTERING
                    right = inside == (role in allowed.split()) and status < 500
                if not right:
                    wrong.append(f"{method} {path} as {role}: {status}")
    assert not wrong, "\n".join(wrong)


def address_of(template: str, values: dict[str, str]) -> str:
    """Return an address with values in the places of its names."""
    return re.sub(r"\{(\w+)(:path)?\}", lambda found: values[found[1]], template)


def queue_of(hub: HubServer, token: str) -> str:
    """Return a queue that the owner of a token may use."""
    if not token:
        return ""
    identity = stores_of(hub).auth.authenticate(token)
    return f"node/{identity.name}" if identity.role == "node" else f"{identity.name}/q"


def test_what_is_no_address_is_told_to_nobody_without_a_token(
    hub: HubServer, tokens: dict[str, str]
) -> None:
    for role, status in (("stranger", 401), ("viewer", 404), ("node", 404), ("operator", 404)):
        with web(hub, tokens[role]) as client:
            assert client.get("/api/secret").status_code == status
            assert client.get("/.git/config").status_code == status


def test_only_operators_see_the_ticket(hub: HubServer, tokens: dict[str, str]) -> None:
    secret = parse_ticket(hub.ticket).secret
    for role, token in tokens.items():
        if role not in ("stranger", "program"):
            with web(hub, token) as client:
                told = client.get("/api/hub")
                assert (secret in told.text) == (role == "operator")
                assert told.json()["role"] == {"other": "job"}.get(role, role)
