"""Delete one job over and over, killed at every instant.

Started as `python -m tests.hub.jobs.deletion_lives`.

For each instant one process, forked from one that has imported everything, makes a hub with two
jobs and deletes the first until it is killed with -9; a second process starts the hub again on the
same folder, waits until it has finished, and looks at what is left. One line of JSON per instant.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from atoll.hub.app import Hub, HubOptions, open_hub
from atoll.wire.messages import Point, QueueEntry
from atoll.wire.states import JobState
from tests.hub.lives import Instants, watch
from tests.patience import PATIENCE_S

SPEC = '[job]\nname = "{name}"\ncode = "sha256:{code}"\n'
URL = "http://127.0.0.1:1"
WAIT_S = PATIENCE_S


async def begin(folder: Path, queue: str) -> Hub:
    options = HubOptions(
        data=folder / "data", jobs=folder / "runs", reducers=False, tls="off", announce=False,
        queue=queue,
    )  # fmt: skip
    hub = await open_hub(options, url=URL)
    await hub.start()
    return hub


async def fill(hub: Hub) -> tuple[str, str]:
    """Make two jobs that have left something everywhere; return their names."""
    stores = hub.stores
    names = []
    for name in ("one", "two"):
        code = name.encode()
        sha256 = await _blob(hub, code)
        job = (
            await stores.jobs.create(SPEC.format(name=name, code=sha256), files={"a.py": "pass"})
        ).job
        names.append(job)
        await stores.logs.add(job, "w0", source="i", seq=1, lines=["a line"])
        point = Point(1.0, 1, 0, {"loss": 1.0})
        await stores.metrics.add(job, "w0", incarnation="i", seq=1, points=[point])
        entry = QueueEntry("k", b"", await _blob(hub, b"large " + code))
        await stores.queue.put_many(f"{job}/q", [entry, QueueEntry("l", b"x")])
        await stores.queue.topics.publish(f"{job}/t", [QueueEntry("k", b"x")])
        await stores.files.write(job, "artifacts/w0/out", b"x" * 100)
        await stores.files.write(job, "checkpoints/round-000001/shared.safetensors", b"x")
        await stores.jobs.set_state(job, JobState.STOPPED)
    await stores.history.flush()
    return names[0], names[1]


async def _blob(hub: Hub, content: bytes) -> str:
    import hashlib

    async def once() -> Any:
        yield content

    sha256 = hashlib.sha256(content).hexdigest()
    await hub.stores.blobs.put(sha256, once(), max_bytes=1000)
    return sha256


async def delete(folder: Path, queue: str, kill_at: int, note: Path) -> None:
    """Be killed while a job is deleted."""
    instants = Instants(0)
    watch(instants)
    hub = await begin(folder, queue)
    first, second = await fill(hub)
    note.write_text(json.dumps([first, second]))
    watch_removals(instants)
    instants._count, instants._kill_at = 0, kill_at
    await hub.deletions.delete(first, by="me")
    instants._kill_at = 0
    await hub.close()


def watch_removals(instants: Instants) -> None:
    """Count what is removed beside the database, too."""
    from atoll.hub.queues import nats_streams

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            instants.passes("before a removal")
            return call(*args, **kwargs)

        return counted

    for name in ("unlink", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))
    remove = nats_streams.NatsStreams.remove

    async def removed(self: Any, queue: str) -> None:
        instants.passes("before a stream goes")
        await remove(self, queue)
        instants.passes("after a stream went")

    nats_streams.NatsStreams.remove = removed  # type: ignore[method-assign]


async def look(folder: Path, queue: str, note: Path) -> str:
    """Start the hub again; return what is wrong with what it has when it has finished."""
    first, second = json.loads(note.read_text())
    hub = await begin(folder, queue)
    try:
        async with asyncio.timeout(WAIT_S):
            while hub.deletions._unfinished or hub.deletions._running:
                await asyncio.sleep(0.01)
        if hub.stores.jobs.knows(first):
            gone = await hub.deletions.delete(first, by="me")  # nothing had been written down
            if not gone["finished"]:
                return "the second try did not finish"
        rows = [row["queue"] for row in await hub.stores.queue.rows()]
        if sorted(rows) != [f"{second}/q", f"{second}/t"]:
            return f"queues {rows}"
    finally:
        await hub.close()
    return traces(folder, first, second)


def traces(folder: Path, first: str, second: str) -> str:
    """Return what is left of the first job that should not be, or what the second lost."""
    connection = sqlite3.connect(folder / "data" / "hub.sqlite")
    tables = [name for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )]  # fmt: skip
    found: dict[str, dict[str, int]] = {first: {}, second: {}}
    for table in tables:
        rows = [" ".join(map(str, row)) for row in connection.execute(f"SELECT * FROM {table}")]
        for job, counts in found.items():
            if count := sum(job in row for row in rows):
                counts[table] = count
    connection.close()
    if found[first] != {"events": 1}:
        return f"rows {found[first]}"
    if not found[second].keys() >= {"blob_holds", "events", "jobs", "logs", "points", "files"}:
        return f"the other job has {found[second]}"
    names = sorted(path.name for path in (folder / "runs").iterdir())
    if names != [".incoming", second]:
        return f"folders {names}"
    files = [path for path in (folder / "runs" / second).rglob("*") if path.is_file()]
    return "" if len(files) == 6 else f"the other job has files {files}"


def forked(work: Callable[[], Any]) -> int:
    """Run something in a process of its own; return how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def run_delete(folder: Path, queue: str, kill_at: int, note: Path) -> None:
    asyncio.run(delete(folder, queue, kill_at, note))


def run_look(folder: Path, queue: str, note: Path, verdict: Path) -> None:
    verdict.write_text(asyncio.run(look(folder, queue, note)))


def main(base: str, queue: str, step: str) -> None:
    """Sweep all instants, or each `step`-th."""
    for kill_at in range(1, 10_000, int(step)):
        folder = Path(base) / str(kill_at)
        folder.mkdir()
        note, verdict = folder / "names.json", folder / "verdict"
        server = f"{queue}/k{kill_at}" if queue else ""
        status = forked(partial(run_delete, folder, server, kill_at, note))
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        looked = forked(partial(run_look, folder, server, note, verdict))
        wrong = verdict.read_text() if looked == 0 else f"the second life ended with {looked}"
        line = {"kill_at": kill_at, "killed": killed, "status": status, "wrong": wrong}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        if not killed:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
