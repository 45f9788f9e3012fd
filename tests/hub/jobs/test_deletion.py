"""Deleting jobs: what goes, what stays, who is refused, and that nothing of it can be half done."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.clock import VirtualClock
from atoll.config import parse_spec
from atoll.errors import HubError
from atoll.hub.jobs.deletion import OF_JOB, POOLED, _queues_of
from atoll.hub.jobs.record import Job
from atoll.hub.jobs.retention import RetentionRules, expired_jobs
from atoll.hub.queues.queues import Queues
from atoll.hub.server import HubServer
from atoll.hub.storage import upload
from atoll.net.http.client import HubClient
from atoll.wire.messages import LogLines, Point, ProcessState, QueueEntry, QueueOptions
from atoll.wire.states import JobState, ProcessPhase
from tests.hub.durable import SPEC, with_stores
from tests.hub.membership import launches, options
from tests.hub.peer import node
from tests.patience import PATIENCE_S

COMMAND = '[job]\nname = "c"\ncommand = ["true"]\n'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as made:
        yield made


@pytest.fixture
def http(hub: HubServer) -> Iterator[httpx.Client]:
    head = {"authorization": f"Bearer {hub.operator_token}"}
    with httpx.Client(base_url=hub.url, headers=head, trust_env=False, timeout=PATIENCE_S) as made:
        yield made


def rows_of(database: Path, job: str) -> dict[str, int]:
    """Return how many rows of each table name a job, in whatever column."""
    connection = sqlite3.connect(database)
    try:
        tables = [name for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )]  # fmt: skip
        found = {}
        for table in tables:
            rows = connection.execute(f"SELECT * FROM {table}").fetchall()
            found[table] = sum(any(job in str(value) for value in row) for row in rows)
        return {table: count for table, count in found.items() if count}
    finally:
        connection.close()


def ended(client: HubClient, *, code: str = "") -> str:
    """Return a job that was stopped before it started."""
    job = client.submit(COMMAND + (f'code = "sha256:{code}"\n' if code else ""))
    client.stop(job, grace_s=0)
    return job


def test_deleted_job_leaves_only_event_and_audit_line(
    tmp_path: Path, hub: HubServer, client: HubClient, http: httpx.Client
) -> None:
    other = ended(client)
    with node(hub, "lap1") as agent:
        job = client.submit(COMMAND)
        launch = launches(agent, 1)["w0"]
        agent.request(LogLines(job, "w0", 1, ["a line"]))
        client.queue_put(f"{job}/q", key="k", payload=b"item")
        client.put_file(job, "artifacts/w0/out.txt", b"x" * 1000)
        agent.request(
            ProcessState(job, "w0", ProcessPhase.EXITED, exit_code=0, attempt=launch.attempt)
        )
        size = http.get(f"/api/jobs/{job}/size").json()
        assert size["file_bytes"] >= 1000
        assert (size["queues"], size["queue_items"], size["queue_bytes"]) == (1, 1, 4)
        gone = client.delete_job(job)
        assert gone["finished"]
        assert gone["file_bytes"] == size["file_bytes"]
        # What its node reports of it later is no error, and brings nothing back.
        agent.request(LogLines(job, "w0", 2, ["late"]))
        agent.request(ProcessState(job, "w0", ProcessPhase.EXITED, exit_code=0, attempt=1))
    assert http.get(f"/api/jobs/{job}").status_code == 404
    assert [row["job"] for row in client.jobs()] == [other]
    assert not (tmp_path / "runs" / job).exists()
    assert (tmp_path / "runs" / other).exists()
    events = client.hub_events()["events"]
    (deleted,) = [event for event in events if event["kind"] == "job-deleted"]
    assert job in deleted["text"]
    assert deleted["fields"]["job"] == job
    (line,) = [row for row in http.get("/api/audit").json() if row["action"] == "delete job"]
    assert line["target"] == f"DELETE /api/jobs/{job}"
    left = rows_of(tmp_path / "data" / "hub.sqlite", job)
    assert left.keys() <= {"events", "audit", "queue_items"}  # of queues: what its node received
    assert left["events"] == 1


def test_deleting_an_unfinished_job_is_refused(client: HubClient, http: httpx.Client) -> None:
    job = client.submit(COMMAND)
    answer = http.delete(f"/api/jobs/{job}")
    assert answer.status_code == 409
    assert answer.json()["error"]["remedy"] == f"end it first: atoll stop {job}"
    with pytest.raises(HubError, match="only jobs that have ended"):
        client.delete_job(job)
    assert client.job(job)["state"] == "waiting"
    assert http.delete("/api/jobs/nope").status_code == 404


def test_only_operators_delete(hub: HubServer, client: HubClient) -> None:
    job = ended(client)
    ticket = client.create_ticket(role="viewer", uses=1, valid_s=60, name="eve")
    with HubClient(hub.url) as stranger:
        token = stranger.log_in(ticket.rpartition("/")[2], name="eve").token
    heads: list[dict[str, str]] = [{}, {"authorization": f"Bearer {token}"}]
    for head in heads:
        with httpx.Client(
            base_url=hub.url, headers=head, trust_env=False, timeout=PATIENCE_S
        ) as other:
            assert other.delete(f"/api/jobs/{job}").status_code in (401, 403)
    assert client.job(job)["state"] == "stopped"


def test_files_stay_where_that_was_asked_for(tmp_path: Path, client: HubClient) -> None:
    job = ended(client)
    assert client.delete_job(job, keep_files=True)["kept"]
    assert (tmp_path / "runs" / job / "job.toml").exists()
    assert client.jobs() == []


def test_undeletable_files_go_later_and_the_job_at_once(
    tmp_path: Path, client: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the server of the queues is away."""
    monkeypatch.setattr("atoll.hub.jobs.deletion.AGAIN_S", 0.1)
    remove, away = Queues.remove, [True]

    async def attempt(queues: Queues, prefix: str) -> None:
        if away[0]:
            raise HubError("the queue server is unavailable")
        await remove(queues, prefix)

    monkeypatch.setattr(Queues, "remove", attempt)
    job = ended(client)
    assert client.delete_job(job)["finished"] is False
    assert client.jobs() == []
    folder = tmp_path / "runs" / job
    assert folder.exists()
    away[0] = False
    deadline = time.monotonic() + 20
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_key_of_a_deleted_job_can_be_used_again(client: HubClient) -> None:
    first = client.submit(COMMAND, key="mine")
    client.stop(first, grace_s=0)
    client.delete_job(first)
    assert client.submit(COMMAND, key="mine") != first


def test_code_goes_with_the_last_job_that_holds_it(hub: HubServer, client: HubClient) -> None:
    code = client.put_blob(b"packed")
    first, second = ended(client, code=code), ended(client, code=code)
    assert client.delete_job(first)["code_bytes"] == 0
    assert client.delete_job(second)["code_bytes"] == len(b"packed")


def test_every_table_that_names_jobs_is_cleared(tmp_path: Path, hub: HubServer) -> None:
    connection = sqlite3.connect(tmp_path / "data" / "hub.sqlite")
    tables = [name for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table'"
    )]  # fmt: skip
    named = {
        table for table in tables
        if "job" in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    }  # fmt: skip
    connection.close()
    assert named == OF_JOB.keys() | {"jobs", "deletions"}


def test_job_deleted_during_an_upload_leaves_no_file(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job

        async def slow() -> Any:
            yield b"first"
            await stores.jobs.set_state(job, JobState.STOPPED)
            stores.files.expect_none(job)
            await stores.files.remove(job)
            yield b"second"

        with pytest.raises(HubError, match="deleted meanwhile"):
            await stores.files.put(job, "artifacts/w0/a", slow())
        assert not stores.jobs.folder(job).exists()

    with_stores(tmp_path, test)


@pytest.mark.parametrize("when", ["arriving", "arrived"])
def test_an_upload_during_a_deletion_leaves_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def test(stores: Any) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        await stores.files.write(job, "model.safetensors", b"of weeks")
        placed = upload.put_in_place

        def place(temporary: Path, path: Path) -> Any:
            status = placed(temporary, path)
            stores.files.expect_none(job)
            return status

        async def chunks() -> Any:
            yield b"first"
            if when == "arriving":
                stores.files.expect_none(job)
            yield b"second"

        monkeypatch.setattr(upload, "put_in_place", place)
        with pytest.raises(HubError, match="deleted meanwhile"):
            await stores.files.put(job, "artifacts/w0/a", chunks())
        folder = stores.jobs.folder(job)
        assert (folder / "model.safetensors").read_bytes() == b"of weeks"
        assert not (folder / "artifacts").exists()

    with_stores(tmp_path, test)


def test_what_is_told_late_of_a_deleted_job_makes_nothing_anew(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        stores.events.forget(job)
        await stores.files.remove(job)
        assert await stores.events.add(job, "late", "somebody was refused") == 0
        assert not (tmp_path / "jobs" / job).exists()
        assert await stores.events.add("", "hub", "others are notified") > 0

    with_stores(tmp_path, test)


def test_a_failed_write_leaves_the_job_where_it_was(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        clock: VirtualClock = stores.jobs._clock
        jobs = []
        for _ in range(3):
            jobs.append((await stores.jobs.create(SPEC, files={})).job)
            clock.advance(1)
        await stores.jobs.set_state(jobs[1], JobState.STOPPED)

        def fail(connection: sqlite3.Connection) -> None:
            raise sqlite3.IntegrityError("no")

        with pytest.raises(sqlite3.IntegrityError):
            await stores.jobs.delete(jobs[1], also=fail)
        assert [job.job for job in stores.jobs.list()] == jobs[::-1]
        with pytest.raises(HubError, match="has not ended"):
            await stores.jobs.delete(jobs[0], also=lambda connection: None)

    with_stores(tmp_path, test)


def test_deletion_removes_queues_and_past_of_one_job_only(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        for job in ("a-1", "a-1x", "a-10"):
            await stores.queue.declare(f"{job}/q", QueueOptions(max_items=3))
            await stores.queue.put_many(f"{job}/q", [QueueEntry("k", b"x")])
            await stores.queue.topics.publish(f"{job}/t", [QueueEntry("k", b"x")])
            await stores.queue.topics.read(f"{job}/t", "me", start="oldest", limit=1)
            point = Point(1.0, 1, 0, {"loss": 1.0})
            await stores.metrics.add(job, "w0", incarnation="i", seq=1, points=[point])
        await stores.history.flush()
        await stores.queue.remove("a-1/")
        await stores.history.forget("a-1/")
        rows = [row["queue"] for row in await stores.queue.rows()]
        assert rows == ["a-10/q", "a-10/t", "a-1x/q", "a-1x/t"]
        # The same names again are new: known keys and positions are forgotten.
        assert not (await stores.queue.put_many("a-1/q", [QueueEntry("k", b"x")])).duplicates
        span = {"since": 0.0, "until": 1e12, "points": 10}
        assert (await stores.history.read("a-1/w0", **span))["times"] == []
        assert (await stores.history.read("a-1x/w0", **span))["times"] != []

    with_stores(tmp_path, test)


def test_of_a_pool_goes_what_is_of_the_actors_of_one_job() -> None:
    spec = '[rl]\npool = "pool/x"\n[[rl.policies]]\nname = "p"\n'
    spec += 'env = "atoll.rl.environments.physics:cartpole"\n'
    assert _queues_of(Job(job="a-1", created=0.0, spec=parse_spec(spec))) == [
        "a-1/", "pool/x/answers.a-1.", "pool/x/experience.a-1.", "pool/x/policy.a-1.",
    ]  # fmt: skip
    assert _queues_of(Job(job="a-1", created=0.0)) == ["a-1/"]


def test_names_of_a_pool_are_those_that_its_actors_use() -> None:
    from atoll.rl.channel.names import QueueNames

    names = QueueNames(pool="pool/x", job="a-1")
    own = tuple(f"pool/x/{kind}.a-1." for kind in POOLED)
    actor = names.actor("w1")
    own_names = (
        names.answers(actor),
        names.experience(actor),
        names.policy(names.task_policy("p")),
    )
    assert all(name.startswith(own) for name in own_names)
    common = (names.roster, names.heartbeat, names.values, names.ask)
    assert not any(name.startswith(own) for name in common)


def job_of(name: str, state: str, age_days: float) -> Job:
    return Job(job=name, created=0.0, state=JobState(state), ended=1e9 - age_days * 86_400)


@pytest.mark.parametrize(
    ("keeping", "gone"),
    [
        (RetentionRules(), set()),
        (RetentionRules(ended=30), {"done", "lost"}),
        (RetentionRules(ended=30, resumable=60), {"done", "lost", "older"}),
        (RetentionRules(resumable=10), {"stopped", "older"}),
        (RetentionRules(ended=0), {"done", "lost", "fresh"}),
    ],
)
def test_retention_deletes_only_overdue_ended_jobs(keeping: RetentionRules, gone: set[str]) -> None:
    """Jobs with a checkpoint that stopped or failed have a time of their own: else for ever."""
    jobs = [
        job_of("done", "done", 40), job_of("fresh", "done", 1), job_of("lost", "failed", 40),
        job_of("stopped", "stopped", 40), job_of("older", "failed", 70),
        Job(job="runs", created=0.0, state=JobState.RUNNING),
    ]  # fmt: skip
    found = expired_jobs(
        jobs, keeping=keeping, now=1e9, resumable=lambda job: job.job in ("stopped", "older")
    )
    assert {job.job for job in found} == gone


def test_hub_deletes_by_age_where_it_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.jobs.retention.LOOK_EVERY_S", 0.1)
    short_lived = dataclasses.replace(options(tmp_path), keeping=RetentionRules(ended=1e-9))
    with HubServer(short_lived) as server, HubClient(server.url, server.operator_token) as client:
        waits = client.submit(COMMAND)
        with node(server, "lap1") as agent:
            launch = launches(agent, 1)["w0"]
            agent.request(
                ProcessState(waits, "w0", ProcessPhase.EXITED, exit_code=0, attempt=launch.attempt)
            )
            deadline = time.monotonic() + PATIENCE_S
            while client.jobs():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        (deleted,) = [e for e in client.hub_events()["events"] if e["kind"] == "job-deleted"]
        assert "older than it is to be kept" in deleted["text"]
