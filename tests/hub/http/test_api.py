"""The hub over HTTP: a real one on a real port."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.hub.app import HubOptions
from atoll.hub.http.middleware import MAX_BODY_BYTES
from atoll.hub.server import HubServer
from atoll.hub.stores import Stores
from atoll.wire.messages import Point
from tests.patience import PATIENCE_S

SPEC = '[job]\nname = "toy"\nnodes = 2\n[train]\nsteps = 100\n'


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[httpx.Client]:
    with client_with(hub, hub.operator_token) as opened:
        yield opened


def client_with(hub: HubServer, token: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=hub.url, headers=headers, timeout=PATIENCE_S, trust_env=False)


def stores_of(hub: HubServer) -> Stores:
    assert hub.hub is not None
    return hub.hub.stores


def submit(client: httpx.Client, spec: str = SPEC, **files: str) -> str:
    answer = client.post("/api/jobs", json={"spec": spec, "files": files})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job"])


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "Traceback" not in answer.text
    return error


def test_a_ticket_lets_a_machine_in_and_its_token_does_not_rule(hub: HubServer) -> None:
    secret = hub.ticket.rpartition("/")[2]
    with client_with(hub, "") as stranger:
        answer = stranger.post("/api/join", json={"secret": secret, "name": "n1"})
        assert answer.status_code == 201
        error = error_of(stranger.post("/api/join", json={"secret": "no", "name": "n2"}), 401)
        assert (error["kind"], "remedy" in error) == ("AuthError", True)
    with client_with(hub, answer.json()["token"]) as node:
        view = node.get("/api/hub").json()
        assert view["role"] == "node"
        assert "ticket" not in view
        for method, path in (("GET", "/api/jobs"), ("POST", "/api/jobs"), ("POST", "/api/tickets")):
            assert error_of(node.request(method, path), 403)["kind"] == "AuthError"
        error_of(node.get("/api/stream"), 403)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/jobs"), ("GET", "/metrics"), ("GET", "/api/hub"), ("POST", "/api/jobs"),
     ("GET", "/api/stream"), ("GET", "/api/nodes"), ("GET", "/anything"),
     ("PUT", "/api/jobs/x/files/a")],
)  # fmt: skip
def test_without_a_token_nothing_opens(hub: HubServer, method: str, path: str) -> None:
    with client_with(hub, "") as stranger:
        error = error_of(stranger.request(method, path), 401)
        assert error["what"] == "a token is missing"


def test_only_the_page_accepts_a_token_in_its_address(hub: HubServer) -> None:
    with client_with(hub, "") as stranger:
        assert stranger.get("/healthz").json() == {"ok": True}
        error_of(stranger.get("/api/nodes", params={"token": hub.operator_token}), 401)


def test_a_job_is_submitted_listed_shown_stopped(client: httpx.Client) -> None:
    job = submit(client, train_py="print(1)")
    view = client.get(f"/api/jobs/{job}").json()
    assert (view["state"], view["nodes_wanted"], view["progress"]["steps"]) == ("waiting", 2, 100)
    assert "steps = 100" in view["spec"]
    assert job in [row["job"] for row in client.get("/api/jobs").json()]
    brief = client.get("/api/jobs", params={"brief": 1}).json()
    assert all("spec" not in row for row in brief)
    assert client.post(f"/api/jobs/{job}/stop", json={"grace_s": 1}).json() == {"job": job}
    assert client.get(f"/api/jobs/{job}").json()["state"] == "stopped"
    kinds = [e["kind"] for e in client.get(f"/api/jobs/{job}/events").json()["events"]]
    assert kinds[0] == "submitted"
    assert kinds[-1] == "stopped"


def test_wrong_requests_are_told_what_is_wrong(client: httpx.Client) -> None:
    wrong = client.post("/api/jobs", json={"spec": "[train]\nstep = 3\n"})
    assert error_of(wrong, 400)["remedy"] == "did you mean 'steps'?"
    assert "not valid TOML" in error_of(client.post("/api/jobs", json={"spec": "["}), 400)["what"]
    error_of(client.post("/api/jobs", content=b"{"), 400)
    error_of(client.post("/api/jobs", json={"spec": 3}), 400)
    error_of(client.post("/api/jobs", json={"spec": SPEC, "files": {"../x": ""}}), 400)
    error_of(client.get("/api/jobs/nope"), 404)
    error_of(client.get("/nope"), 404)
    allowed = client.delete("/api/jobs")
    assert error_of(allowed, 405)["expected"] == "one of GET, HEAD, POST"
    job = submit(client)
    error_of(client.get(f"/api/jobs/{job}/metrics", params={"after": "x"}), 400)


def test_bodies_are_bounded_declared_or_not(client: httpx.Client) -> None:
    large = bytes(MAX_BODY_BYTES + 1)

    def undeclared() -> Iterator[bytes]:
        for start in range(0, len(large), 2**20):
            yield large[start : start + 2**20]

    for body in (large, undeclared()):
        try:
            answer = client.post("/api/jobs", content=body)
        except httpx.WriteError:
            continue  # the hub answered and closed before all was sent
        assert error_of(answer, 413)["kind"] == "FrameTooLarge"
    assert client.get("/healthz").status_code == 200


def test_files_go_in_and_out_with_their_hash(client: httpx.Client) -> None:
    job, data = submit(client), bytes(range(256)) * 5000
    digest = hashlib.sha256(data).hexdigest()
    path = f"/api/jobs/{job}/files/checkpoints/r/a.bin"
    put = client.put(path, content=data, headers={"x-sha256": digest})
    assert (put.status_code, put.json()["sha256"]) == (201, digest)
    got = client.get(path)
    assert (got.content, got.headers["x-sha256"]) == (data, digest)
    head = client.head(path)
    assert (head.headers["content-length"], head.content) == (str(len(data)), b"")
    part = client.get(path, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    listed = {info["name"]: info["nbytes"] for info in client.get(f"/api/jobs/{job}/files").json()}
    assert listed["checkpoints/r/a.bin"] == len(data)
    assert "job.toml" in listed
    damaged = client.put(path, content=b"x", headers={"x-sha256": digest})
    assert "damaged" in error_of(damaged, 400)["what"]
    assert client.get(path).content == data
    error_of(client.get(f"/api/jobs/{job}/files/none"), 404)
    error_of(client.get(f"/api/jobs/{job}/files/..%2f..%2fdata%2fsecrets.json"), 400)


@pytest.mark.parametrize(
    "name",
    [
        *("job.toml", "metrics.jsonl", "checkpoints/r/manifest.json"),
        *("paths.json", "verification.json", "JOB.TOML", "Verification.json", "x.JSONL"),
        *("checkpoints/r/Manifest.json", "VERIFICATION/0-0", "job.toml."),
    ],
)
def test_files_of_the_hub_itself_cannot_be_put(client: httpx.Client, name: str) -> None:
    job = submit(client)
    error_of(client.put(f"/api/jobs/{job}/files/{name}", content=b"x"), 403)


@pytest.mark.parametrize(
    ("name", "status"),
    [("artifacts/w0/a", 201), ("artifacts/w1/a", 403), ("ARTIFACTS/w1/a", 403),
     ("checkpoints/round-000001/w0.safetensors", 201),
     ("checkpoints/round-000001/shared.safetensors", 201),
     ("checkpoints/round-000001/w1.safetensors", 403),
     ("checkpoints/Round-000001/W1.safetensors", 403),
     ("checkpoints/round-000001/rank-00000.safetensors", 403), ("model.safetensors", 201)],
)  # fmt: skip
def test_a_member_writes_its_own_artifacts_and_parts(
    hub: HubServer, client: httpx.Client, name: str, status: int
) -> None:
    job = submit(client)
    token = hub.call(stores_of(hub).auth.issue_job_token(job, member="w0", attempt=1))
    with client_with(hub, token) as worker:
        assert worker.put(f"/api/jobs/{job}/files/{name}", content=b"x").status_code == status


def test_change_at_which_the_hub_failed_is_in_the_audit_log(
    hub: HubServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    job = submit(client)

    async def fails(job: str, *, grace_s: float) -> None:
        raise RuntimeError("half of it was done")

    monkeypatch.setattr(hub.hub.live, "stop", fails)
    error_of(client.post(f"/api/jobs/{job}/stop", json={}), 500)
    last = client.get("/api/audit").json()[-1]
    assert (last["action"], last["outcome"]) == ("stop", "500")
    assert last["text"].endswith("the hub failed")


def test_a_job_token_opens_its_job_only(hub: HubServer, client: httpx.Client) -> None:
    own, other = submit(client), submit(client)
    token = hub.call(stores_of(hub).auth.issue_job_token(own))
    with client_with(hub, token) as worker:
        assert worker.put(f"/api/jobs/{own}/files/a", content=b"x").status_code == 201
        assert worker.get(f"/api/jobs/{own}").status_code == 200
        error_of(worker.put(f"/api/jobs/{other}/files/a", content=b"x"), 403)
        error_of(worker.get(f"/api/jobs/{other}"), 403)
        error_of(worker.post(f"/api/jobs/{own}/stop", json={}), 403)
        error_of(worker.get("/api/jobs"), 403)
        put = {"queue": f"{own}/q", "key": "k", "payload": "aGk="}
        assert worker.post("/api/queues/put", json=put).json()["duplicate"] is False
        error_of(worker.post("/api/queues/put", json=put | {"queue": f"{other}/q"}), 403)
    hub.call(stores_of(hub).auth.revoke_job(own))
    with client_with(hub, token) as worker:
        error_of(worker.get(f"/api/jobs/{own}"), 401)


def test_a_queue_works_over_http(client: httpx.Client) -> None:
    put = {"queue": "q", "key": "k", "payload": "aGk="}
    assert client.post("/api/queues/put", json=put).json()["duplicate"] is False
    assert client.post("/api/queues/put", json=put).json()["duplicate"] is True
    claim = {"queue": "q", "lease_s": 30.0}
    (item,) = client.post("/api/queues/claim?request=1", json=claim).json()["items"]
    assert client.post("/api/queues/claim?request=1", json=claim).json()["items"] == [item]
    assert (item["payload"], item["attempt"]) == ("aGk=", 1)
    lease = {"queue": "q", "lease": item["lease"]}
    assert client.post("/api/queues/extend", json=lease | {"lease_s": 60.0}).status_code == 200
    assert client.post("/api/queues/release", json=lease | {"reason": "r"}).status_code == 200
    (item,) = client.post("/api/queues/claim", json=claim).json()["items"]
    assert client.post("/api/queues/ack", json={"queue": "q", "lease": item["lease"]}).is_success
    assert "not held" in error_of(client.post("/api/queues/ack", json=lease), 409)["what"]
    assert client.get("/api/queues/dead", params={"queue": "q"}).json() == []
    (row,) = [row for row in client.get("/api/queues").json() if row["queue"] == "q"]
    assert (row["ready"], row["leased"], row["dead"], row["bytes"]) == (0, 0, 0, 0)


def test_logs_and_metrics_are_read_from_where_one_left_off(
    hub: HubServer, client: httpx.Client
) -> None:
    job, stores = submit(client), stores_of(hub)
    hub.call(stores.logs.add(job, "w0", source="s", seq=1, lines=["a", "b"]))
    first = client.get(f"/api/jobs/{job}/logs", params={"limit": 1}).json()
    assert [line["text"] for line in first["lines"]] == ["a"]
    rest = client.get(f"/api/jobs/{job}/logs", params={"after": first["last"]}).json()
    assert [line["text"] for line in rest["lines"]] == ["b"]
    tail = client.get(f"/api/jobs/{job}/logs", params={"tail": 1}).json()
    assert [line["text"] for line in tail["lines"]] == ["b"]
    points = [Point(1.0, 10, 1, {"loss": float("nan"), "tokens_per_s": 5.0})]
    hub.call(stores.metrics.add(job, "w0", incarnation="i", seq=1, points=points))
    read = client.get(f"/api/jobs/{job}/metrics").json()
    assert read["points"][0]["values"] == {"loss": None, "tokens_per_s": 5.0}
    assert client.get(f"/api/jobs/{job}/metrics", params={"after": read["last"]}).json() == {
        "last": read["last"],
        "points": [],
    }
    assert client.get(f"/api/jobs/{job}/rounds").json() == {"last": 0, "rounds": []}


def test_speed_is_measured_both_ways(client: httpx.Client) -> None:
    assert len(client.get("/api/speed", params={"bytes": 200_001}).content) == 200_001
    assert client.post("/api/speed", content=bytes(123_456)).json() == {"bytes": 123_456}


def test_prometheus_can_read_the_figures(client: httpx.Client) -> None:
    submit(client)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'[a-z_]+(\{([a-z]+="[^"]*",?)*\})? (NaN|[+-]?Inf|-?[0-9.e+-]+)')
    names = set()
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            assert sample.fullmatch(line), line
            names.add(line.partition("{")[0].partition(" ")[0])
    assert {"atoll_jobs", "atoll_hub_uptime_seconds", "atoll_relay_bytes_total"} <= names
    assert 'atoll_jobs{state="waiting"}' in answer.text


def test_a_login_sets_a_cookie_that_other_sites_cannot_use(hub: HubServer) -> None:
    with client_with(hub, "") as browser:
        assert 'action="login"' in browser.get("/").text
        moved = browser.get("/", params={"token": hub.operator_token})
        assert (moved.status_code, moved.headers["location"]) == (303, "./")
        assert "httponly" in moved.headers["set-cookie"].lower()
        page = browser.get("/")
        assert "<main" in page.text
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert browser.get("/api/jobs").status_code == 200
        body = {"spec": SPEC}
        error_of(browser.post("/api/jobs", json=body), 403)
        evil = {"origin": "http://evil.example"}
        error_of(browser.post("/api/jobs", json=body, headers=evil), 403)
        own = {"origin": hub.url}
        assert browser.post("/api/jobs", json=body, headers=own).status_code == 201
        browser.cookies.clear()
        refused = browser.post("/login", data={"token": "<b>wrong"})
        assert refused.status_code == 401
        assert "Refused: this token is not valid at this hub." in refused.text


def test_event_stream_resumes_where_it_was_cut(hub: HubServer, client: httpx.Client) -> None:
    job, stores = submit(client), stores_of(hub)
    points = [Point(1.0, n, 0, {"loss": 1.0}) for n in range(1, 4)]
    hub.call(stores.metrics.add(job, "w0", incarnation="i", seq=1, points=points))

    def first_tick(last_id: str = "") -> tuple[str, dict[str, Any]]:
        """Return the first tick with points: all pages share one snapshot, which may be older."""
        headers = {"last-event-id": last_id} if last_id else {}
        with client.stream("GET", "/api/stream", params={"job": job}, headers=headers) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            while True:
                id_ = next(line for line in lines if line.startswith("id: "))[4:]
                data = next(line for line in lines if line.startswith("data: "))[6:]
                if json.loads(data)["points"]:
                    return id_, json.loads(data)

    id_, tick = first_tick()
    assert [point["step"] for point in tick["points"]] == [1, 2, 3]
    assert (tick["job"]["job"], next(e["kind"] for e in tick["events"])) == (job, "submitted")
    hub.call(stores.metrics.add(job, "w0", incarnation="i", seq=4, points=points[:1]))
    _, tick = first_tick(id_)
    assert [point["step"] for point in tick["points"]] == [1]
    assert tick["events"] == []


def test_a_failure_inside_shows_no_stack_trace(
    hub: HubServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("secret detail")

    assert hub.hub is not None
    monkeypatch.setattr(hub.hub.live, "nodes", broken)
    answer = client.get("/api/nodes")
    assert error_of(answer, 500)["remedy"] == "see the hub's log"
    assert "secret detail" not in answer.text


def test_a_full_disk_is_507(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    def full(*_: object) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"x")

    job = submit(client)
    monkeypatch.setattr("atoll.hub.storage.upload._write_block", full)
    error = error_of(client.put(f"/api/jobs/{job}/files/a", content=b"x"), 507)
    assert error["kind"] == "StorageFull"


def test_events_of_the_hub_are_given_once(hub: HubServer, client: httpx.Client) -> None:
    secret = hub.ticket.rpartition("/")[2]
    with client_with(hub, "") as stranger:
        stranger.post("/api/join", json={"secret": secret, "name": "n7"})
    first = client.get("/api/events").json()
    assert first["events"][-1]["id"] == first["last"]
    for _ in range(3):
        again = client.get("/api/events", params={"after": first["last"]}).json()
        assert again == {"last": first["last"], "events": []}
