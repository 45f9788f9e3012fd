"""People with less than they want: viewers, machines and jobs, browsers with a foreign page."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import httpx
from websockets.exceptions import InvalidStatus

from atoll.net.endpoint import parse_ticket
from atoll.node.identity.identity import Identity
from atoll.wire.job_messages import LogLines, ProcessState, Stop
from atoll.wire.messages import Failure, QueueClaim, QueuePut, RoundJoin, TopicRead
from atoll.wire.states import ProcessPhase
from bench.attack.attacks import Suite, hold
from bench.attack.site import SPEC, Site

suite = Suite()

WAITING = SPEC.replace("nodes = 1\n", 'nodes = 1\non = ["nobody"]\n')
"""A job that no machine gets, so that what changes it is the attack."""

ROLES = "each role may do what the table of roles says"
ANOTHER_SITE = "a page of another site can neither act nor read"
COOKIE = "the cookie is a login of one browser, not the token"
REVOKED = "a revoked ticket ends its logins at once"
AUDIT = "refusals push no action out of the audit log"

OPERATORS = {
    "POST": (
        "/api/jobs", "/api/jobs/{job}/stop", "/api/jobs/{job}/resume", "/api/jobs/{job}/nodes",
        "/api/tickets", "/api/nodes/{node}/revoke", "/api/nodes/{node}/drain", "/api/pairing",
        "/api/tickets/0000000000/revoke", "/api/alarms/1/silence", "/api/queues/requeue",
        "/api/queues/discard",
    ),
    "GET": ("/api/tickets", "/api/audit", "/api/secrets", "/api/pairing"),
    "PUT": ("/api/secrets/STOLEN",),
    "DELETE": ("/api/jobs/{job}", "/api/secrets/ANY"),
}  # fmt: skip
"""What the documentation gives to operators alone."""

NOT_FOR_MACHINES = ("/api/jobs", "/api/nodes", "/metrics", "/api/events", "/api/stream")


@suite.attack(ROLES)
def act_as_operator_with_other_tokens(site: Site) -> str:
    victim, node = site.operator.submit(WAITING), site.node()
    tokens: dict[str, tuple[str, Identity | None]] = {
        "viewer": (site.token("viewer"), None), "node": (node.token, node),
    }  # fmt: skip
    tried = 0
    for role, (token, me) in tokens.items():
        with site.web(token, me=me) as web:
            for method, paths in OPERATORS.items():
                for path in paths:
                    address = path.format(job=victim, node=node.node)
                    status = web.request(method, address, json={}).status_code
                    hold(status in (401, 403), f"{method} {path} as {role}: {status}")
                    tried += 1
            for path in NOT_FOR_MACHINES if role == "node" else ():
                status = web.get(path).status_code
                hold(status in (401, 403), f"GET {path} as node: {status}")
    hold(site.operator.job(victim)["state"] == "waiting", "the job of the victim changed")
    return f"{tried} requests of viewer and node: refused"


@suite.attack(ROLES)
def speak_for_others_on_the_socket(site: Site) -> str:
    victim, other, me = site.operator.submit(WAITING), site.node(), site.node()
    bodies = [
        RoundJoin(0, "base"),
        Stop(victim, "w0", grace_s=0.0),
        LogLines(victim, "w0", 1, ["forged"]),
        QueueClaim(f"{victim}/q", lease_s=1.0),
        QueueClaim(f"node/{other.node}", lease_s=1.0),
        QueuePut(f"node/{other.node}", key="k", payload=b"run this"),
        TopicRead(f"{victim}/t", "reader", after=0),
    ]
    for body in bodies:
        with site.session(me.node, me.token, me=me) as session:
            answer = session.ask(body)
            hold(isinstance(answer, Failure), f"{type(body).__name__} was answered with {answer}")
    for address in (other.node, f"{victim}/w0", "operator", "", f"{me.node}/../{other.node}"):
        with contextlib.suppress(Exception), site.session(address, me.token, me=me) as session:
            hold(not session.welcome, f"a machine opened the session {address!r}")
    with site.session(me.node, me.token, me=me) as session:
        ended = ProcessState(victim, "w0", ProcessPhase.EXITED, exit_code=0)
        session.ask(ended)
    hold(site.operator.job(victim)["state"] == "waiting", "a machine ended a job of others")
    return f"{len(bodies)} messages, 5 addresses: refused"


@suite.attack(ROLES)
def read_blobs_and_secrets_of_others(site: Site) -> str:
    site.operator.set_secret("ATTACKED", "the value nobody may see")
    victim = site.operator.submit(
        '[job]\nname = "s"\nnodes = 1\ncommand = ["true"]\n[launch]\nsecrets = ["ATTACKED"]\n'
        'env = ["HIDDEN=the value in env"]\n'
    )
    digest = site.operator.put_blob(b"code of somebody")
    me = site.node()
    with site.web(me.token, me=me) as web:
        status = web.get(f"/api/blobs/{digest}").status_code
        hold(status in (401, 403, 404), f"a machine without the job read its code: {status}")
    for token, who in ((site.token("viewer"), None), (me.token, me)):
        with site.web(token, me=who) as web:
            hold(web.get(f"/api/jobs/{victim}/secrets").status_code in (401, 403), "secrets read")
            for path in ("", "/files/job.toml", "/events", "/logs"):
                text = web.get(f"/api/jobs/{victim}{path}").text
                for value in ("nobody may see", "the value in env"):
                    hold(value not in text, f"{path or 'the view'} shows {value!r}")
    for path in ("/api/secrets", "/api/audit", f"/api/jobs/{victim}"):
        with site.web(site.cluster.token) as web:
            hold("nobody may see" not in web.get(path).text, f"{path} shows it to an operator")
    site.operator.stop(victim, grace_s=0.0)
    return "blob, secret and [launch] env stay hidden from viewer, node and lists"


FOREIGN: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"}, {"origin": "https://127.0.0.1.evil.example"}, {},
)  # fmt: skip


@contextlib.contextmanager
def _browser(site: Site) -> Iterator[httpx.Client]:
    with site.web() as web:
        moved = web.get("/", params={"token": site.token("operator")})
        hold(moved.status_code == 303, f"the login answers {moved.status_code}")
        yield web


@suite.attack(ANOTHER_SITE)
def act_from_a_foreign_page(site: Site) -> str:
    with _browser(site) as web:
        for headers in FOREIGN:
            status = web.post("/api/jobs", json={"spec": SPEC}, headers=headers).status_code
            hold(status == 403, f"POST /api/jobs with {headers}: {status}")
        for headers in FOREIGN[:4]:
            if headers != {"origin": "null"}:
                status = web.get("/api/jobs", headers=headers).status_code
                hold(status == 403, f"GET /api/jobs with {headers}: {status}")
        same = {"origin": str(web.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = {**same, "content-type": kind}
            status = web.post("/api/jobs", content=b"{}", headers=headers).status_code
            hold(status == 403, f"a form ({kind}) was taken: {status}")
        status = web.post("/logout", headers={"origin": "http://evil.example"}).status_code
        hold(status == 403, f"another site logged somebody out: {status}")
        page = web.get("/")
        hold("frame-ancestors 'none'" in page.headers["content-security-policy"], "may be framed")
        hold("access-control-allow-origin" not in page.headers, "CORS is open")
    for origin in ("http://evil.example", "null"):
        try:
            with site.socket(additional_headers={"Origin": origin}):
                hold(False, f"a page of {origin} opened the socket")
        except InvalidStatus as refused:
            hold(refused.response.status_code == 403, "the socket answers otherwise")
    with site.web() as web:
        answer = web.get(
            "/", params={"token": site.token("operator")}, headers={"sec-fetch-site": "cross-site"}
        )
        hold("set-cookie" not in answer.headers, "a link of another site logs in")
    return f"{len(FOREIGN)} origins, forms, frames, sockets, links: refused"


@suite.attack(COOKIE)
def use_a_stolen_cookie(site: Site) -> str:
    with _browser(site) as web:
        (value,) = web.cookies.values()
        (cookie,) = web.cookies.jar
        with site.web(value) as thief:
            hold(thief.get("/api/jobs").status_code == 401, "the cookie's value is a token")
        flags = f"{vars(cookie)}".lower()
        hold("httponly" in flags and "samesite" in flags, f"flags of the cookie: {flags}")
        hold(cookie.secure or not site.secure, "the cookie is sent in clear, too")
        same = {"origin": str(web.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
        copied = dict(web.cookies)
        hold(web.post("/logout", headers=same).status_code == 303, "logging out failed")
        with site.web(cookies=copied) as thief:
            status = thief.get("/api/jobs").status_code
            hold(status == 401, f"a copied cookie outlives the logout: {status}")
    return "no token, HttpOnly, SameSite; ends with the logout"


@suite.attack(REVOKED)
def go_on_after_the_ticket_is_revoked(site: Site) -> str:
    ticket = parse_ticket(site.operator.create_ticket(role="viewer", uses=1))
    with site.client() as client:
        token = client.log_in(ticket.secret, name="fired").token
    (row,) = [t for t in site.operator.tickets() if t["used_by"] == ["fired"]]
    with site.web(token) as web, web.stream("GET", "/api/stream") as stream:
        hold(stream.status_code == 200, f"the stream answers {stream.status_code}")
        site.operator.revoke_ticket(row["id"])
        deadline = time.monotonic() + 60.0
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            for _ in stream.iter_raw():
                hold(time.monotonic() < deadline, "its open stream goes on")
    with site.web(token) as web:
        status = web.get("/api/jobs").status_code
    hold(status in (401, 403), f"its token goes on: {status}")
    return "stream cut, token refused"


@suite.attack(AUDIT)
def push_an_action_out_of_the_audit_log(site: Site) -> str:
    mark = site.operator.create_ticket(role="viewer", uses=1, name="remember me")
    hold(mark, "no ticket was made")
    with site.web() as web:
        for number in range(300):
            web.get(f"/api/jobs/{number}")
    text = json.dumps(site.operator.audit())
    hold("/api/tickets" in text or "ticket" in text, "the ticket is not in the audit log")
    hold(not re.search(parse_ticket(mark).secret, text), "the audit log shows a secret")
    return "300 refused requests: the action is still there, no secret is"
