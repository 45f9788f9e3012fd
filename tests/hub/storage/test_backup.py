"""Backups of a hub that works: whole, checked, and good enough to start another hub from."""

from __future__ import annotations

import base64
import hashlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from atoll.clock import RealClock, VirtualClock
from atoll.errors import CheckpointCorrupt, ConfigError, HubError
from atoll.hub.app import HubOptions
from atoll.hub.quotas.limits import read_quotas
from atoll.hub.server import HubServer
from atoll.hub.storage import backup, backup_files
from atoll.hub.storage.backup import BackupResult, take
from atoll.hub.storage.restore import EPOCHS_AHEAD, restore
from atoll.wire.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
)
from atoll.wire.messages import Register, RoundJoin, RoundPlan, RoundVote, Verdict
from tests.hub.membership import launches
from tests.hub.peer import Peer, member, node, submit
from tests.patience import PATIENCE_S


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path / "first")) as server:
        yield server


def options(folder: Path, *, source: Path | None = None) -> HubOptions:
    return HubOptions(
        data=folder / "data", jobs=folder / "runs", reducers=False, restore_from=source
    )


def client(hub: HubServer) -> httpx.Client:
    token = {"authorization": f"Bearer {hub.operator_token}"}
    return httpx.Client(base_url=hub.url, headers=token, trust_env=False, timeout=PATIENCE_S)


def put(rest: httpx.Client, key: str) -> bool:
    """Put an item; return whether the hub had it already."""
    payload = base64.b64encode(key.encode()).decode()
    answer = rest.post("/api/queues/put", json={"queue": "q", "key": key, "payload": payload})
    assert answer.is_success, answer.text
    return bool(answer.json()["duplicate"])


def copy(hub: HubServer, tmp_path: Path, *, keep: int | None = None) -> BackupResult:
    """Back the hub up while it runs."""
    assert hub.hub is not None
    data = hub.hub.options.data
    return take(tmp_path / "backups", data=data, clock=RealClock(), keep=keep)


def checkpoint(folder: Path, round_: int, content: bytes) -> Path:
    """Write a complete checkpoint as the hub would have; return its folder."""
    path = folder / checkpoint_folder(round_)
    path.mkdir(parents=True)
    digest = hashlib.sha256(content).hexdigest()
    part = ManifestPart(name="shared.safetensors", member="w0", sha256=digest, nbytes=len(content))
    (path / part.name).write_bytes(content)
    manifest = Manifest(
        job=folder.name, round=round_, step=10, members=["w0"], parts=[part], created=0.0
    )
    (path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return path


def names(snapshot: BackupResult) -> set[str]:
    return {entry.name for entry in snapshot.listing.files}


def test_backup_has_everything_acknowledged_before_it(hub: HubServer, tmp_path: Path) -> None:
    before: list[str] = []
    stop, enough = threading.Event(), threading.Event()

    def produce() -> None:
        with client(hub) as rest:
            for number in range(100_000):
                put(rest, f"k{number}")
                before.append(f"k{number}")
                if number == 50:
                    enough.set()
                if stop.is_set():
                    return

    producer = threading.Thread(target=produce)
    producer.start()
    assert enough.wait(PATIENCE_S)
    acknowledged = list(before)
    snapshot = copy(hub, tmp_path)
    stop.set()
    producer.join(PATIENCE_S)
    with HubServer(options(tmp_path / "second", source=snapshot.path)) as again:
        assert again.ticket.rpartition("/")[2] == hub.ticket.rpartition("/")[2]
        assert again.operator_token == hub.operator_token
        with client(again) as rest:
            assert all(put(rest, key) for key in acknowledged)
            assert not put(rest, "new")
            (event,) = [e for e in rest.get("/api/events").json()["events"]
                       if e["kind"] == "restored"]  # fmt: skip
            assert "restored from a backup" in event["text"]


def test_backup_has_files_and_complete_checkpoints(hub: HubServer, tmp_path: Path) -> None:
    job = submit(hub, nodes=1)
    folder = tmp_path / "first" / "runs" / job
    with client(hub) as rest:
        assert rest.put(f"/api/jobs/{job}/files/model.safetensors", content=b"m" * 999).is_success
    checkpoint(folder, 3, b"three")
    (checkpoint(folder, 4, b"four") / "shared.safetensors").write_bytes(b"FOUR")
    (folder / checkpoint_folder(5)).mkdir()
    (folder / checkpoint_folder(5) / "w0.safetensors").write_bytes(b"under way")
    (folder / "metrics.jsonl").write_bytes(b'{"a":1}\n{"half')
    (tmp_path / "first" / "data" / "quotas.toml").write_text('job_disk = "5GB"\n')
    snapshot = copy(hub, tmp_path)
    assert len(snapshot.left_out) == 1
    assert "round-000004" in snapshot.left_out[0]
    restore(snapshot.path, data=tmp_path / "d", jobs=tmp_path / "j", clock=RealClock())
    made = tmp_path / "j" / job
    assert (made / "model.safetensors").read_bytes() == b"m" * 999
    assert (made / checkpoint_folder(3) / "shared.safetensors").read_bytes() == b"three"
    assert (made / checkpoint_folder(3) / MANIFEST_NAME).is_file()
    assert not (made / checkpoint_folder(4)).exists()
    assert (made / "metrics.jsonl").read_bytes() == b'{"a":1}\n'
    assert (tmp_path / "d" / "secrets.json").stat().st_mode & 0o077 == 0
    assert read_quotas(tmp_path / "d" / "quotas.toml").job_disk == 5 * 10**9


def test_backup_takes_newer_checkpoint_if_one_vanishes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "first" / "runs" / submit(hub, nodes=1)
    old = checkpoint(folder, 1, b"old")
    real = backup_files.copy

    def deleting(source: Path, target: Path, *, whole_lines: bool) -> tuple[int, str]:
        if source == old / "shared.safetensors":
            checkpoint(folder, 2, b"newer")
            (old / MANIFEST_NAME).unlink()
            source.unlink()
        return real(source, target, whole_lines=whole_lines)

    monkeypatch.setattr(backup, "copy", deleting)
    snapshot = copy(hub, tmp_path)
    kept = {name for name in names(snapshot) if "checkpoints" in name}
    assert {name.split("/")[3] for name in kept} == {"round-000002"}


def test_unchanged_files_are_shared_and_old_backups_go(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "first" / "runs" / submit(hub, nodes=1)
    checkpoint(folder, 1, b"weights" * 1000)
    name = f"jobs/{folder.name}/{checkpoint_folder(1)}/shared.safetensors"
    first = copy(hub, tmp_path)
    second = copy(hub, tmp_path)
    assert (first.path / name).stat().st_ino == (second.path / name).stat().st_ino
    third = copy(hub, tmp_path, keep=2)
    assert not first.path.exists()
    assert (third.path / name).read_bytes() == b"weights" * 1000
    assert backup_files.newest(tmp_path / "backups") == third.path
    restore(second.path, data=tmp_path / "d", jobs=tmp_path / "j", clock=RealClock())


def test_interrupted_backup_is_removed_after_a_day(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups = tmp_path / "backups"
    remains = backups / ".taking-dead"
    remains.mkdir(parents=True)
    (remains / backup_files.LIST).write_text("{}")
    monkeypatch.setattr(backup, "write_synced", _fail)
    with pytest.raises(ConfigError):
        copy(hub, tmp_path)
    assert list(backups.iterdir()) == [remains]
    with pytest.raises(ConfigError, match="no complete backup"):
        restore(backups, data=tmp_path / "d", jobs=tmp_path / "j", clock=RealClock())
    monkeypatch.undo()
    later = VirtualClock(remains.stat().st_mtime + 2 * 86_400)
    take(backups, data=tmp_path / "first" / "data", clock=later)
    assert not remains.exists()


def _fail(path: Path, content: bytes) -> None:
    raise PermissionError(13, "no", str(path))


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "gone"])
def test_damaged_backup_is_refused_and_puts_nothing_in_place(
    hub: HubServer, tmp_path: Path, damage: str
) -> None:
    snapshot = copy(hub, tmp_path)
    database = snapshot.path / "data" / "hub.sqlite"
    content = bytearray(database.read_bytes())
    content[5000] ^= 1
    if damage == "gone":
        database.unlink()
    else:
        database.write_bytes(content if damage == "other bytes" else content[:-1])
    with pytest.raises(CheckpointCorrupt, match=r"hub\.sqlite"):
        restore(snapshot.path, data=tmp_path / "d", jobs=tmp_path / "j", clock=RealClock())
    assert not (tmp_path / "d").exists()


def test_restoring_over_other_records_is_refused(hub: HubServer, tmp_path: Path) -> None:
    snapshot = copy(hub, tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(HubError, match="already has the records of a hub"):
        restore(snapshot.path, data=first / "data", jobs=first / "runs", clock=RealClock())
    for expected in (True, False, False):
        listing = restore(
            tmp_path / "backups", data=second / "data", jobs=second / "runs", clock=RealClock()
        )
        assert (listing is not None) is expected


def test_interrupted_restore_can_be_begun_again(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "first" / "runs" / submit(hub, nodes=1)
    checkpoint(folder, 1, b"one")
    snapshot = copy(hub, tmp_path)
    data, jobs = tmp_path / "d", tmp_path / "j"
    data.mkdir()
    (data / ".hub.sqlite.restoring").write_bytes(b"half")
    (data / "hub.sqlite-wal").write_bytes(b"the log of a database that is gone")
    half = jobs / folder.name / checkpoint_folder(1)
    half.mkdir(parents=True)
    (half / ".x.restoring").write_bytes(b"on")
    assert restore(snapshot.path, data=data, jobs=jobs, clock=RealClock()) is not None
    assert (half / "shared.safetensors").read_bytes() == b"one"
    with HubServer(HubOptions(data=data, jobs=jobs, reducers=False)) as again:
        assert again.hub is not None
        assert again.hub.stores.jobs.knows(folder.name)


def test_restored_attempts_exceed_the_lost_hubs(hub: HubServer, tmp_path: Path) -> None:
    with node(hub, "n") as machine:
        job = submit(hub, nodes=1)
        launch = launches(machine, 1)["w0"]
        with member(hub, launch) as worker:
            worker.request(Register())
            plan = worker.request(RoundJoin(0, "base"))
            assert isinstance(plan, RoundPlan)
            snapshot = copy(hub, tmp_path)  # the attempt is open in it
            verdict = worker.request(RoundVote(0, plan.epoch, True, "d", ["w0"]))
            assert isinstance(verdict, Verdict)
            assert verdict.committed
    second = tmp_path / "second"
    with HubServer(options(second, source=snapshot.path)) as again:
        assert again.hub is not None
        assert again.hub.stores.jobs.get(job).state == "running"
        with member(again, launch) as worker:
            worker.request(Register())
            old = worker.request(RoundVote(0, plan.epoch, True, "d", ["w0"]))
            assert isinstance(old, Verdict)
            assert not old.committed
            assert "backup" in old.reason
            fresh = worker.request(RoundJoin(0, "base"))
            assert isinstance(fresh, RoundPlan)
            assert fresh.epoch > plan.epoch + EPOCHS_AHEAD


def test_parts_that_are_not_in_the_backup_are_forgotten(tmp_path: Path) -> None:
    with HubServer(options(tmp_path / "first")) as hub:
        job = submit(hub, nodes=1)
        assert hub.hub is not None

        def insert(connection: sqlite3.Connection) -> None:
            for name in ("w0.safetensors", "shared.safetensors"):
                connection.execute(
                    "INSERT INTO checkpoint_parts (job, round, name, member, step, sha256, nbytes)"
                    " VALUES (?, 7, ?, 'w0', 1, 'x', 3)",
                    (job, name),
                )

        hub.call(hub.hub.stores.database.write(insert))
        under_way = tmp_path / "first" / "runs" / job / checkpoint_folder(7)
        under_way.mkdir(parents=True)
        (under_way / "w0.safetensors").write_bytes(b"abc")
        snapshot = copy(hub, tmp_path)
    restore(snapshot.path, data=tmp_path / "d", jobs=tmp_path / "j", clock=RealClock())
    with sqlite3.connect(tmp_path / "d" / "hub.sqlite") as connection:
        rows = connection.execute("SELECT name FROM checkpoint_parts").fetchall()
    connection.close()
    assert rows == [("w0.safetensors",)]


def test_where_no_hub_is_nothing_is_backed_up(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="no hub to back up"):
        take(tmp_path / "backups", data=tmp_path, clock=RealClock())
    assert not (tmp_path / "backups").exists()


def test_listing_names_files_and_node_address(hub: HubServer, tmp_path: Path) -> None:
    submit(hub, nodes=1)
    snapshot = copy(hub, tmp_path)
    found = {
        path.relative_to(snapshot.path).as_posix()
        for path in snapshot.path.rglob("*")
        if path.is_file() and path.name != backup_files.LIST
    }
    assert found == names(snapshot)
    listing = msgspec.json.decode((snapshot.path / backup_files.LIST).read_bytes())
    assert f"atoll://{listing['address']}/" in hub.ticket


def test_peers_reopen_sessions_at_the_restored_hub(hub: HubServer, tmp_path: Path) -> None:
    assert hub.hub is not None
    name, token = hub.call(hub.hub.stores.auth.redeem(hub.ticket.rpartition("/")[2], name="n"))
    snapshot = copy(hub, tmp_path)
    with (
        HubServer(options(tmp_path / "second", source=snapshot.path)) as again,
        Peer(again, name, token=token) as peer,
    ):
        assert peer.session == name
