"""Every quota against a real hub: what is refused, who is named, and what frees it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from atoll.errors import LimitReached, QueueFull, from_dict
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.quotas import disk
from atoll.hub.quotas.limits import Quotas
from atoll.hub.server import HubServer
from atoll.net.endpoint import HubEndpoint, parse_ticket
from atoll.net.http.client import HubClient
from atoll.wire.messages import (
    Beat,
    Done,
    Failure,
    Message,
    Metrics,
    Point,
    QueueAck,
    QueueClaim,
    QueueItems,
    QueueOpen,
    QueueOptions,
    QueuePut,
    QueuePutDone,
)
from tests.hub.peer import Peer
from tests.security.conftest import login, operator, serving, stores_of, until, web

KB = 1_000
SPEC = '[job]\nname = "toy"\nnodes = 2\n'


@contextlib.contextmanager
def limited(folder: Path, **quotas: int) -> Iterator[HubServer]:
    intervals = AlarmIntervals(every_s=0.1, patience=0.01)
    with serving(folder, quotas=Quotas(**quotas), alarm_intervals=intervals) as hub:
        yield hub


def alarm_about(hub: HubServer, who: str) -> dict[str, Any]:
    """Wait for the alarm that names someone, and return it."""
    with operator(hub) as client:
        found = until(
            lambda: [
                alarm
                for alarm in client.alarms()
                if alarm["kind"] == "limit-reached" and who in alarm["cause"]
            ]
        )
    return dict(found[0])


def row_of(hub: HubServer, kind: str, who: str) -> dict[str, Any]:
    with operator(hub) as client:
        (row,) = [
            use for use in client.limits()["uses"] if (use["kind"], use["who"]) == (kind, who)
        ]
    return dict(row)


def error_of(answer: Message) -> Exception:
    assert isinstance(answer, Failure), answer
    return from_dict(answer.error)


# ------------------------------------------------------------------------------------- disk


def put_file(hub: HubServer, job: str, name: str, nbytes: int, *, announced: bool = True) -> int:
    """Store a file; return the status."""
    data = b"x" * nbytes
    content: Any = data if announced else (data[at : at + KB] for at in range(0, nbytes, KB))
    with web(hub, hub.operator_token) as client:
        return client.put(f"/api/jobs/{job}/files/{name}", content=content).status_code


def test_files_of_a_job_end_at_its_limit(tmp_path: Path) -> None:
    with limited(tmp_path, job_disk=50 * KB) as hub:
        with operator(hub) as client:
            job, other = client.submit(SPEC), client.submit(SPEC)
        assert put_file(hub, job, "a.bin", 40 * KB) == 201
        for announced in (True, False):
            assert put_file(hub, job, "b.bin", 20 * KB, announced=announced) == 429
        assert put_file(hub, other, "b.bin", 20 * KB) == 201
        assert put_file(hub, job, "a.bin", 41 * KB) == 201  # in the place of the old one
        folder = tmp_path / "jobs" / job
        assert (folder / "a.bin").stat().st_size == 41 * KB
        assert not (folder / "b.bin").exists()
        assert not list((tmp_path / "jobs" / ".incoming").iterdir())
        alarm = alarm_about(hub, f"job {job}")
        assert alarm["job"] == job
        row = row_of(hub, "job_disk", f"job {job}")
        assert row["reached"]
        assert row["refused"] == 2

        def counted() -> bool:  # events of the alarm are written after it is shown
            used = row_of(hub, "job_disk", f"job {job}")["used"]
            return bool(used == sum(path.stat().st_size for path in folder.iterdir()))

        until(counted)
        (folder / "a.bin").unlink()
        assert put_file(hub, job, "b.bin", 20 * KB) == 201


def test_a_ticket_limits_all_jobs_of_its_login(tmp_path: Path) -> None:
    with limited(tmp_path) as hub:
        with operator(hub) as client:
            ticket = parse_ticket(client.create_ticket(role="operator", quotas={"disk": 30 * KB}))
            token = client.log_in(ticket.secret, name="anna").token
            (shown,) = [one for one in client.tickets() if one["quotas"]]
            assert shown["quotas"] == {"disk": 30 * KB}
            free = client.submit(SPEC)
        with HubClient(hub.url, token, endpoint=HubEndpoint(ca=hub.ca)) as anna:
            first, second = anna.submit(SPEC), anna.submit(SPEC)
        assert put_file(hub, first, "a.bin", 20 * KB) == 201
        assert put_file(hub, second, "a.bin", 20 * KB) == 429
        assert put_file(hub, free, "a.bin", 20 * KB) == 201
        assert "its ticket" in error_text(hub, second, "a.bin", 20 * KB)
        assert alarm_about(hub, "operator anna")["cause"]


def error_text(hub: HubServer, job: str, name: str, nbytes: int) -> str:
    with web(hub, hub.operator_token) as client:
        answer = client.put(f"/api/jobs/{job}/files/{name}", content=b"x" * nbytes)
        return str(answer.json()["error"]["expected"])


def test_a_full_job_keeps_its_metrics_in_the_database(tmp_path: Path) -> None:
    with limited(tmp_path, job_disk=20 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        assert put_file(hub, job, "a.bin", 18 * KB) == 201
        with Peer(hub, f"{job}/w0") as member:
            for seq in range(1, 200):
                point = Point(time=float(seq), step=seq, round=0, values={"loss": 1.0})
                member.request(Metrics("i1", seq, [point]))
        folder = tmp_path / "jobs" / job
        assert folder_bytes(folder) < 25 * KB
        with operator(hub) as client:
            assert max(point["step"] for point in client.metrics(job)["points"]) == 199


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ----------------------------------------------------------------------------------- queues


def put(peer: Peer, queue: str, key: str, nbytes: int, *, wait_s: float = 0.0) -> Message:
    return peer.request(QueuePut(queue=queue, key=key, payload=b"x" * nbytes, wait_s=wait_s))


def test_bytes_of_a_queue_end_at_its_limit(tmp_path: Path) -> None:
    with limited(tmp_path, queue=30 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with Peer(hub, f"{job}/w0") as member:
            assert isinstance(put(member, f"{job}/a", "1", 20 * KB), QueuePutDone)
            error = error_of(put(member, f"{job}/a", "2", 20 * KB))
            assert isinstance(error, QueueFull)
            assert f"queue {job}/a" in str(error)
            assert "30 kB" in str(error)
            assert isinstance(put(member, f"{job}/a", "1", 20 * KB), QueuePutDone)  # repeated
            assert isinstance(put(member, f"{job}/b", "2", 20 * KB), QueuePutDone)
            assert alarm_about(hub, f"queue {job}/a")
            take_all(member, f"{job}/a")
            assert isinstance(put(member, f"{job}/a", "2", 20 * KB), QueuePutDone)


def take_all(peer: Peer, queue: str) -> None:
    answer = peer.request(QueueClaim(queue=queue, lease_s=60.0, limit=100))
    assert isinstance(answer, QueueItems)
    for item in answer.items:
        peer.request(QueueAck(queue=queue, lease=item.lease))


def test_all_queues_of_a_job_share_a_limit(tmp_path: Path) -> None:
    with limited(tmp_path, job_queues=30 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with Peer(hub, f"{job}/w0") as member, Peer(hub, f"{job}/w1") as other:
            assert isinstance(put(member, f"{job}/a", "1", 20 * KB), QueuePutDone)
            error = error_of(put(member, f"{job}/b", "2", 20 * KB))
            assert isinstance(error, QueueFull)
            assert f"job {job}" in str(error)
            assert row_of(hub, "job_queues", f"job {job}")["used"] == 20 * KB
            # A producer that may wait goes on as soon as another queue has become shorter.
            opened = QueueOpen(queue=f"{job}/b", options=QueueOptions(overflow="wait"))
            assert isinstance(other.request(opened), Done)
            waiting = other.ask(
                QueuePut(queue=f"{job}/b", key="2", payload=b"x" * 20 * KB, wait_s=50.0)
            )
            take_all(member, f"{job}/a")
            assert isinstance(other.answer(waiting), QueuePutDone)
            assert row_of(hub, "job_queues", f"job {job}")["used"] == 20 * KB


def test_what_queues_hold_is_known_after_a_restart(tmp_path: Path) -> None:
    with limited(tmp_path, job_queues=30 * KB, job_disk=90 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with Peer(hub, f"{job}/w0") as member:
            put(member, f"{job}/a", "1", 20 * KB)
        assert put_file(hub, job, "a.bin", 80 * KB) == 201
    with limited(tmp_path, job_queues=30 * KB, job_disk=90 * KB) as hub:
        with Peer(hub, f"{job}/w0") as member:
            assert isinstance(error_of(put(member, f"{job}/b", "2", 20 * KB)), QueueFull)
        assert put_file(hub, job, "b.bin", 20 * KB) == 429
        assert row_of(hub, "job_queues", f"job {job}")["used"] == 20 * KB


# ------------------------------------------------------------------------------------ blobs


def put_blob(hub: HubServer, token: str, data: bytes) -> int:
    with web(hub, token) as client:
        name = hashlib.sha256(data).hexdigest()
        return client.put(f"/api/blobs/{name}", content=data).status_code


def test_a_token_sends_so_many_blobs_and_no_more(tmp_path: Path) -> None:
    with limited(tmp_path, blobs=3, blob_bytes=50 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        token = hub.call(stores_of(hub).auth.issue_job_token(job, member="w0", attempt=1))
        other = hub.call(stores_of(hub).auth.issue_job_token(job, member="w1", attempt=1))
        assert put_blob(hub, token, b"a" * 40 * KB) == 201
        assert put_blob(hub, token, b"b" * 20 * KB) == 429
        assert put_blob(hub, token, b"a" * 40 * KB) == 201  # the same again
        assert put_blob(hub, token, b"c") == 201
        assert put_blob(hub, other, b"d") == 201
        assert put_blob(hub, token, b"e") == 429
        assert put_blob(hub, hub.operator_token, b"e") == 201
        assert alarm_about(hub, f"job {job}")["job"] == job
        assert row_of(hub, "blobs", f"job {job}")["used"] == 3
        assert row_of(hub, "blob_bytes", f"job {job}")["used"] == 40 * KB + 2
        assert not list((tmp_path / "data" / "blobs" / ".incoming").iterdir())


# ------------------------------------------------------------------------------ connections


def test_connections_of_a_token_end_at_its_limit(tmp_path: Path) -> None:
    with limited(tmp_path) as hub:
        with operator(hub) as client:
            ticket = parse_ticket(client.create_ticket(role="viewer", quotas={"connections": 2}))
            token = client.log_in(ticket.secret, name="vera").token
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(web(hub, token)) for _ in range(3)]
            assert [client.get("/api/hub").status_code for client in clients] == [200, 200, 429]
            assert clients[0].get("/api/hub").status_code == 200  # those that are there stay
            text = clients[2].get("/api/hub").json()["error"]
            assert "viewer vera" in text["what"]
            assert alarm_about(hub, "viewer vera")
            clients[0].close()
            until(lambda: clients[2].get("/api/hub").status_code == 200)


def test_sessions_count_as_connections(tmp_path: Path) -> None:
    with limited(tmp_path, connections=2) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        token = hub.call(stores_of(hub).auth.issue_job_token(job))
        with Peer(hub, f"{job}/w0", token=token), Peer(hub, f"{job}/w1", token=token):
            with Peer(hub, f"{job}/w2", token=token) as third:
                assert isinstance(error_of(third.welcome), LimitReached)
                with pytest.raises(ConnectionClosed):
                    third.request(Beat())
            assert alarm_about(hub, f"job {job}")["job"] == job
        until(lambda: welcomed(hub, f"{job}/w2", token))


def welcomed(hub: HubServer, session: str, token: str) -> bool:
    with Peer(hub, session, token=token) as peer:
        return not isinstance(peer.welcome, Failure)


# ------------------------------------------------------------------- reducers and the views


def test_a_reducer_learns_its_limits_and_is_shown(tmp_path: Path) -> None:
    with limited(tmp_path, reducer_member=1000, reducer_job=5000) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with Peer(hub, f"{job}/reducer") as reducer, Peer(hub, f"{job}/w0") as member:
            assert reducer.welcome.limits == {  # type: ignore[attr-defined]
                "reducer_member": 1000, "reducer_job": 5000,
            }  # fmt: skip
            assert member.welcome.limits == {}  # type: ignore[attr-defined]
            figures = {
                "held_bytes": 900.0, "refused": 0.0, "held_bytes/w0": 900.0, "refused/w0": 2.0,
            }  # fmt: skip
            reducer.request(Beat(figures))
            alarm = alarm_about(hub, f"job {job}/w0")
            assert (alarm["job"], alarm["member"]) == (job, "w0")
            row = row_of(hub, "reducer_member", f"job {job}/w0")
            assert (row["used"], row["limit"], row["refused"]) == (900, 1000, 2)


def test_viewers_see_limits_and_prometheus_exports_them(tmp_path: Path) -> None:
    with limited(tmp_path, job_disk=50 * KB) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        assert put_file(hub, job, "a.bin", 60 * KB) == 429
        with web(hub, login(hub, "viewer")) as client:
            found = client.get("/api/limits").json()
            assert found["uses"][0]["who"] == f"job {job}"
            assert found["limits"]["job_disk"] == 50 * KB
            text = client.get("/metrics").text
        labels = f'kind="job_disk",role="job",name="{job}",member=""'
        assert f"atoll_quota_limit{{{labels}}} 50000" in text
        assert f"atoll_quota_refused_total{{{labels}}} 1" in text


def test_frames_of_a_session_follow_the_quota(tmp_path: Path) -> None:
    with limited(tmp_path, frames_per_s=50) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with Peer(hub, f"{job}/w0") as member:
            for _ in range(200):
                member.tell(Beat())
            assert "50 frames" in alarm_about(hub, f"{job}/w0")["cause"]


def test_a_file_that_comes_during_a_measurement_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as hub, operator(hub) as client:
        folder = tmp_path / "jobs" / client.submit(SPEC)
        meter = stores_of(hub).files._disk
        assert meter is not None
        measure = disk.folder_bytes
        came: list[int] = []

        def during(place: Path) -> int:
            before = measure(place)
            if not came:
                came.append((folder / "b").write_bytes(bytes(500)))
                meter.came(folder.name, 500)
            return before

        monkeypatch.setattr(disk, "folder_bytes", during)
        hub.call(meter.measure(folder.name))
        assert came == [500]
        assert meter.used(folder.name) == measure(folder)
