"""What the ledger says is what is stored: after any puts, acknowledgements, deletes, restarts."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.clock import VirtualClock
from atoll.errors import LimitReached, QueueFull
from atoll.hub.quotas import disk as disk_module
from atoll.hub.quotas.ledger import Holder
from atoll.hub.quotas.limits import Kind, Quotas
from atoll.hub.storage.blobs import UNHELD_S
from atoll.hub.stores import Stores, open_stores
from atoll.wire.messages import QueueEntry, QueueOptions
from tests.hub.durable import BOUND_S, SPEC, with_stores
from tests.tiers import examples

LIMITS = Quotas(
    job_disk=20_000, queue=3_000, job_queues=5_000, blobs=4, blob_bytes=4_000, disk=30_000
)
JOBS = ("a", "b")
KEYS = ("x", "y")
SIZES = st.integers(0, 4_000)

_actions = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("ack"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("die"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("discard"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("remove"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("file"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("unlink"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("blob"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("sweep"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("event"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
    st.tuples(st.just("restart"), st.sampled_from(JOBS), st.sampled_from(KEYS), SIZES),
)


class World:
    """Stores that are opened again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, VirtualClock()
        self.jobs: dict[str, str] = {}
        self.number = 0
        self.stored: set[bytes] = set()
        """Payloads whose puts were acknowledged, and that no consumer has taken away."""

    async def opened(self) -> Stores:
        stores = await open_stores(
            self.folder / "data", jobs_dir=self.folder / "jobs", clock=self.clock, quotas=LIMITS
        )
        await stores.queue.start()
        return stores

    async def do(self, stores: Stores, what: str, job: str, key: str, size: int) -> None:
        acting: dict[str, Callable[[Stores, str, str, int], Awaitable[None]]] = {
            "put": self.put, "ack": self.ack, "die": self.die, "discard": self.discard,
            "remove": self.remove, "file": self.file, "unlink": self.unlink, "blob": self.blob,
            "sweep": self.sweep, "event": self.event,
        }  # fmt: skip
        await acting[what](stores, self.jobs[job], key, size)

    def payload(self, size: int) -> bytes:
        self.number += 1
        return f"{self.number} ".encode().ljust(size, b".")

    async def put(self, stores: Stores, job: str, key: str, size: int) -> None:
        payload = self.payload(size)
        before = await used(stores)
        try:
            await stores.queue.put_many(f"{job}/{key}", [QueueEntry(str(self.number), payload)])
            self.stored.add(payload)
        except QueueFull:
            queue = before.get((Kind.QUEUE, Holder("queue", f"{job}/{key}")), 0)
            queues = before.get((Kind.JOB_QUEUES, Holder("job", job)), 0)
            full = queue + len(payload) > LIMITS.queue, queues + len(payload) > LIMITS.job_queues
            assert any(full)

    async def take(self, stores: Stores, job: str, key: str) -> list[Any]:
        return list(await stores.queue.claim(f"{job}/{key}", lease_s=60.0, limit=2))

    async def ack(self, stores: Stores, job: str, key: str, size: int) -> None:
        for item in await self.take(stores, job, key):
            await stores.queue.ack(f"{job}/{key}", lease=item.lease)
            self.stored.discard(item.payload)

    async def die(self, stores: Stores, job: str, key: str, size: int) -> None:
        await stores.queue.declare(f"{job}/{key}", QueueOptions(max_attempts=1))
        for item in await self.take(stores, job, key):
            await stores.queue.release(f"{job}/{key}", lease=item.lease)

    async def discard(self, stores: Stores, job: str, key: str, size: int) -> None:
        for letter in await stores.queue.dead_letters(f"{job}/{key}"):
            self.stored.discard(letter.payload)
        await stores.queue.discard(f"{job}/{key}")

    async def remove(self, stores: Stores, job: str, key: str, size: int) -> None:
        rows = await stores.database.read(
            lambda c: c.execute(
                "SELECT payload FROM queue_items WHERE queue LIKE ?", (f"{job}/%",)
            ).fetchall()
        )
        self.stored -= {bytes(payload) for (payload,) in rows}
        await stores.queue.remove(f"{job}/")

    async def file(self, stores: Stores, job: str, key: str, size: int) -> None:
        before = folder_bytes(self.folder / "jobs" / job)
        data = self.payload(size)
        try:
            await stores.files.put(job, f"{key}.bin", stream(data), announced=size % 3 and size)
        except LimitReached:
            assert before + len(data) > LIMITS.job_disk or self.all_bytes() > 0

    def all_bytes(self) -> int:
        return sum(folder_bytes(self.folder / "jobs" / job) for job in self.jobs.values())

    async def unlink(self, stores: Stores, job: str, key: str, size: int) -> None:
        (self.folder / "jobs" / job / f"{key}.bin").unlink(missing_ok=True)

    async def blob(self, stores: Stores, job: str, key: str, size: int) -> None:
        data = self.payload(size)
        name = hashlib.sha256(data).hexdigest()
        try:
            await stores.blobs.put(
                name, stream(data), max_bytes=10_000, holder=Holder("job", job), announced=size % 2
            )
        except LimitReached:
            assert not stores.blobs.path(name).exists()
            return
        if size % 5 == 0:
            await stores.database.write(lambda c: stores.blobs.hold(c, name, f"job/{job}"))

    async def sweep(self, stores: Stores, job: str, key: str, size: int) -> None:
        self.clock.advance(UNHELD_S + 60)
        await stores.blobs.sweep()

    async def event(self, stores: Stores, job: str, key: str, size: int) -> None:
        await stores.events.add(job, "note", "x" * size)

    async def check(self, stores: Stores) -> None:
        """Compare what the ledger says with the tables and the folders."""
        self.clock.advance(60)
        said = await used(stores)
        queues: dict[str, int] = {}
        payloads = set()
        rows = await stores.database.read(
            lambda c: c.execute(
                "SELECT queue, nbytes, payload FROM queue_items WHERE state != 'done'"
            ).fetchall()
        )
        for queue, nbytes, payload in rows:
            queues[queue] = queues.get(queue, 0) + nbytes
            payloads.add(bytes(payload))
        assert self.stored <= payloads  # nothing acknowledged was lost
        held = {holder.name: n for (kind, holder), n in said.items() if kind is Kind.QUEUE}
        assert held == {queue: nbytes for queue, nbytes in queues.items() if nbytes}
        for job in self.jobs.values():
            mine = sum(n for queue, n in queues.items() if queue.startswith(f"{job}/"))
            assert said.get((Kind.JOB_QUEUES, Holder("job", job)), 0) == mine <= LIMITS.job_queues
            disk = said[Kind.JOB_DISK, Holder("job", job)]
            assert disk == folder_bytes(self.folder / "jobs" / job)
        owned = await stores.database.read(_blobs)
        for job in self.jobs.values():
            number, nbytes = owned.get(job, (0, 0))
            holder = Holder("job", job)
            assert said.get((Kind.BLOBS, holder), 0) == number <= LIMITS.blobs
            assert said.get((Kind.BLOB_BYTES, holder), 0) == nbytes <= LIMITS.blob_bytes
        stored = await stores.database.read(
            lambda c: c.execute("SELECT sha256 FROM blob_senders").fetchall()
        )
        assert all(stores.blobs.path(sha256).exists() for (sha256,) in stored)


async def used(stores: Stores) -> dict[tuple[Kind, Holder], int]:
    return {(use.kind, use.holder): use.used for use in await stores.ledger.uses()}


def _blobs(connection: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    rows = connection.execute(
        "SELECT name, count(*), sum(nbytes) FROM blob_senders GROUP BY name"
    ).fetchall()
    return {name: (number, nbytes) for name, number, nbytes in rows}


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def stream(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 500):
        yield data[start : start + 500]


@settings(max_examples=examples(25), deadline=None)
@given(actions=st.lists(_actions, min_size=5, max_size=30))
def test_the_ledger_says_what_is_stored(actions: list[tuple[str, str, str, int]]) -> None:
    async def test(folder: Path) -> None:
        world = World(folder)
        stores = await world.opened()
        try:
            for name in JOBS:
                world.jobs[name] = (await stores.jobs.create(SPEC, files={}, by="anna")).job
            for action in actions:
                if action[0] == "restart":
                    await stores.close()
                    stores = await world.opened()
                else:
                    await world.do(stores, *action)
            await world.check(stores)
        finally:
            await stores.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(test(Path(folder)), BOUND_S))


def test_a_job_deleted_while_it_is_measured_stays_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stores: Stores) -> None:
        disk = stores.files._disk
        assert disk is not None

        def deleted_meanwhile(folder: Path) -> int:
            disk.forget("j")
            return 5

        monkeypatch.setattr(disk_module, "folder_bytes", deleted_meanwhile)
        assert await disk.measure("j") == 5
        assert disk.used("j") == 0

    with_stores(tmp_path, test)
