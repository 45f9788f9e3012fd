"""Blobs: named by their hash, there whole or not at all, kept while somebody holds them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from atoll.clock import RealClock, VirtualClock
from atoll.errors import AuthError, ConfigError, FrameTooLarge, HubError, StorageFull, WireError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.storage import upload
from atoll.hub.storage.backup import take
from atoll.hub.storage.blobs import UNHELD_S
from atoll.hub.stores import Stores
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.wire.messages import NodeInfo
from tests.hub.durable import with_stores
from tests.patience import PATIENCE_S
from tests.security.conftest import SPEC, stores_of

MEBIBYTE = 2**20


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def put(stores: Stores, data: bytes) -> str:
    assert await stores.blobs.put(name_of(data), stream(data), max_bytes=MEBIBYTE) == len(data)
    return name_of(data)


async def hold(stores: Stores, sha256: str, owner: str) -> None:
    await stores.database.write(lambda connection: stores.blobs.hold(connection, sha256, owner))


async def drop(stores: Stores, owner: str) -> None:
    await stores.database.write(lambda connection: stores.blobs.drop(connection, owner))


def test_a_blob_comes_back_and_putting_it_again_changes_nothing(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        assert not stores.blobs.has(name_of(b"payload"))
        sha256 = await put(stores, b"payload")
        await put(stores, b"payload")
        assert stores.blobs.has(sha256)
        assert stores.blobs.nbytes(sha256) == 7
        assert stores.blobs.path(sha256).read_bytes() == b"payload"
        assert stores.blobs.path(sha256).parent.name == sha256[:2]

    with_stores(tmp_path, test)


def test_wrong_or_too_many_bytes_leave_nothing(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        sha256 = name_of(b"payload")
        with pytest.raises(WireError, match="arrived damaged"):
            await stores.blobs.put(sha256, stream(b"PAYLOAD"), max_bytes=100)
        with pytest.raises(FrameTooLarge):
            await stores.blobs.put(sha256, stream(b"pay", b"load"), max_bytes=6)
        assert not stores.blobs.has(sha256)
        assert [path for path in (tmp_path / "data/blobs").rglob("*") if path.is_file()] == []

    with_stores(tmp_path, test)


@pytest.mark.parametrize("name", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_only_a_hash_is_a_name(tmp_path: Path, name: str) -> None:
    async def test(stores: Stores) -> None:
        with pytest.raises(ConfigError, match="not the name of a blob"):
            await stores.blobs.put(name, stream(b"x"), max_bytes=10)
        with pytest.raises(ConfigError):
            stores.blobs.has(name)

    with_stores(tmp_path, test)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    def full(file: object, hasher: object, block: bytes) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(block)

    async def test(stores: Stores) -> None:
        monkeypatch.setattr(upload, "_write_block", full)
        with pytest.raises(StorageFull):
            await put(stores, b"payload")
        assert not stores.blobs.has(name_of(b"payload"))

    with_stores(tmp_path, test)


def test_unheld_blobs_are_deleted_after_an_hour(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def test(stores: Stores) -> None:
        kept, shared, loose = [await put(stores, data) for data in (b"kept", b"shared", b"loose")]
        await hold(stores, kept, "job/a")
        await hold(stores, shared, "job/a")
        await hold(stores, shared, "queue/1")
        clock.advance(UNHELD_S - 1)
        assert await stores.blobs.sweep() == 0
        clock.advance(2)
        assert await stores.blobs.sweep() == 1
        assert [stores.blobs.has(sha256) for sha256 in (kept, shared, loose)] == [True, True, False]
        await drop(stores, "job/a")
        clock.advance(UNHELD_S + 1)
        assert await stores.blobs.sweep() == 1
        assert [stores.blobs.has(sha256) for sha256 in (kept, shared)] == [False, True]
        await drop(stores, "queue/1")
        clock.advance(UNHELD_S + 1)
        assert await stores.blobs.sweep() == 1

    with_stores(tmp_path, test, clock=clock)


def test_being_asked_for_is_a_reason_to_stay_for_another_hour(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def test(stores: Stores) -> None:
        sha256 = await put(stores, b"payload")
        clock.advance(UNHELD_S + 1)
        assert stores.blobs.has(sha256)
        assert await stores.blobs.sweep() == 0

    with_stores(tmp_path, test, clock=clock)


def test_holding_a_missing_blob_rolls_back_the_write(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        held = await put(stores, b"payload")

        def write(connection: sqlite3.Connection) -> None:
            stores.blobs.hold(connection, held, "job/a")
            stores.blobs.hold(connection, name_of(b"never sent"), "job/a")

        with pytest.raises(HubError, match=r"does not have this blob.*send it again"):
            await stores.database.write(write)
        count = await stores.database.read(
            lambda connection: connection.execute("SELECT count(*) FROM blob_holds").fetchone()
        )
        assert count == (0,)

    with_stores(tmp_path, test)


def test_holds_outlive_the_hub(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def first(stores: Stores) -> None:
        await hold(stores, await put(stores, b"payload"), "job/a")

    async def second(stores: Stores) -> None:
        clock.advance(UNHELD_S + 1)
        assert await stores.blobs.sweep() == 0
        assert stores.blobs.has(name_of(b"payload"))

    with_stores(tmp_path, first, clock=clock)
    with_stores(tmp_path, second, clock=clock)


# A hub's stores that take a blob without end; says so when the first bytes are on the disk.
ENDLESS = """
import asyncio, sys
from pathlib import Path
from atoll.clock import RealClock
from tests.patience import PATIENCE_S
from atoll.hub.stores import open_stores

async def main(folder):
    stores = await open_stores(folder / "data", jobs_dir=folder / "jobs", clock=RealClock())
    async def endless():
        while True:
            yield bytes(2**20)
            incoming = folder / "data/blobs/.incoming"
            if sum(path.stat().st_size for path in incoming.iterdir()) > 2**20:
                print("half", flush=True)
            await asyncio.sleep(0.01)
    await stores.blobs.put("ab" * 32, endless(), max_bytes=2**40)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
def test_hub_killed_during_an_upload_keeps_no_partial_blob(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    blobs = tmp_path / "data/blobs"
    assert [path for path in blobs.rglob("*") if path.is_file()] != []

    async def test(stores: Stores) -> None:
        assert not stores.blobs.has("ab" * 32)
        assert [path for path in blobs.rglob("*") if path.is_file()] == []

    with_stores(tmp_path, test)


# ------------------------------------------------------------------------------- over the wire


def options(folder: Path, *, source: Path | None = None) -> HubOptions:
    return HubOptions(
        data=folder / "data", jobs=folder / "runs", reducers=False, restore_from=source
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(options(tmp_path)) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[HubClient]:
    with HubClient(hub.url, hub.operator_token) as opened:
        yield opened


def test_a_client_sends_a_blob_once_and_another_fetches_it(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    data = os.urandom(3 * MEBIBYTE + 5)
    source, target = tmp_path / "source", tmp_path / "folder" / "target"
    source.write_bytes(data)
    progress: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        progress.append((done, total))

    sha256 = client.put_blob(source, progress=note)
    assert sha256 == name_of(data)
    assert progress[-1] == (len(data), len(data))
    progress.clear()
    assert client.put_blob(data, progress=note) == sha256
    assert progress == []  # the hub had it: nothing was sent again

    ticket = parse_ticket(hub.ticket)
    info = NodeInfo("kitchen", "Linux", "3.11", "0.1.0")
    with HubClient(hub.url) as stranger:
        _, token, _ = stranger.join(ticket.secret, name="kitchen", info=info)
    with HubClient(hub.url, token) as node, pytest.raises(AuthError, match="its own jobs only"):
        node.get_blob(sha256, target)
    job = client.submit(SPEC)
    issued = hub.call(stores_of(hub).auth.issue_job_token(job))
    with HubClient(hub.url, issued) as member:
        member.get_blob(sha256, target)
    assert target.read_bytes() == data


def test_node_gets_the_code_of_jobs_that_run_on_it(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    code = client.put_blob(b"a pack")
    other = client.put_blob(b"another pack")
    with HubClient(hub.url) as stranger:
        info = NodeInfo("kitchen", "Linux", "3.11", "0.1.0")
        _, token, _ = stranger.join(parse_ticket(hub.ticket).secret, name="kitchen", info=info)
    job = client.submit(f'[job]\nname = "toy"\ncommand = ["true"]\ncode = "sha256:{code}"\n')
    hub.call(stores_of(hub).jobs.members.assign(job, member="w0", slot=0, node="kitchen"))
    with HubClient(hub.url, token) as node:
        node.get_blob(code, tmp_path / "target")
        with pytest.raises(AuthError):
            node.get_blob(other, tmp_path / "other")
    assert (tmp_path / "target").read_bytes() == b"a pack"


def test_a_blob_that_is_not_there_or_not_a_blob_is_told(client: HubClient, tmp_path: Path) -> None:
    assert not client.has_blob("ab" * 32)
    with pytest.raises(HubError, match="does not have this blob"):
        client.get_blob("ab" * 32, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_hub_refuses_other_bytes_and_strangers(hub: HubServer) -> None:
    address = f"{hub.url}/api/blobs/{name_of(b'right')}"
    token = {"authorization": f"Bearer {hub.operator_token}"}
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as raw:
        assert raw.put(address, content=b"right").status_code == 401
        assert raw.get(address).status_code == 401
        answer = raw.put(address, content=b"wrong", headers=token)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "WireError")
        assert raw.head(address, headers=token).status_code == 404
        answer = raw.put(f"{hub.url}/api/blobs/..%2f..%2fhub.sqlite", content=b"x", headers=token)
        assert answer.status_code in (400, 404, 405)
        assert raw.put(address, content=b"right", headers=token).status_code == 201
        part = raw.get(address, headers={**token, "range": "bytes=1-2"})
        assert (part.status_code, part.content) == (206, b"ig")


def test_damaged_blob_is_noticed_and_can_be_resent(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    assert hub.hub is not None
    sha256 = client.put_blob(b"payload")
    hub.hub.stores.blobs.path(sha256).write_bytes(b"PAYLOAD")
    with pytest.raises(Exception, match="arrived damaged"):
        client.get_blob(sha256, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_backups_carry_the_blobs_that_are_held(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    assert hub.hub is not None
    stores = hub.hub.stores
    held, loose = client.put_blob(b"held"), client.put_blob(b"loose")
    stores.database.write_now(lambda connection: stores.blobs.hold(connection, held, "job/a"))
    first = take(tmp_path / "backups", data=hub.hub.options.data, clock=RealClock())
    snapshot = take(tmp_path / "backups", data=hub.hub.options.data, clock=RealClock())
    name = f"data/blobs/{held[:2]}/{held}"
    assert [entry.name for entry in snapshot.listing.files if "blobs" in entry.name] == [name]
    assert snapshot.left_out == []
    assert (snapshot.path / name).samefile(first.path / name)
    with (
        HubServer(options(tmp_path / "second", source=snapshot.path)) as again,
        HubClient(again.url, again.operator_token) as other,
    ):
        other.get_blob(held, tmp_path / "target")
        assert not other.has_blob(loose)
        assert again.hub is not None
        asyncio.run(again.hub.stores.blobs.sweep())
        assert other.has_blob(held)
    assert (tmp_path / "target").read_bytes() == b"held"
