"""Several machines of one island on this one: supervisors as real processes, and a real hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil

from atoll.config import IslandTable, JobSpec, JobTable, StrategyTable, dump_spec
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.node.launchers.launcher import Exit
from atoll.node.launchers.process import ChildProcess, ProcessLauncher
from atoll.wire.messages import Launch
from tests.hub.membership import launches
from tests.hub.peer import Peer, node
from tests.node.launchers.ordering import make_order, until

SPEC = '[job]\nname = "g"\nnodes = 2\ncommand = ["true"]\n'
"""A job that gives its processes tokens; what runs in them is none of the hub's business here."""

HEAD = """
import json, os, signal, sys, time
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print("here", rank, os.getpid(), flush=True)
def wait_for_all():
    mark = os.path.join({shared!r}, os.environ["MASTER_PORT"])
    open(f"{{mark}}-{{rank}}", "w").close()
    while not all(os.path.exists(f"{{mark}}-{{r}}") for r in range(ranks)):
        time.sleep(0.01)
"""


class RendezvousHub:
    """A hub with a running job, which can be ended and started again at the same place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = contextlib.ExitStack()
        self.server = self._start(port=0)
        self.agent: Peer = self._open.enter_context(node(self.server, "box"))
        with HubClient(self.server.url, self.server.operator_token) as client:
            self.job = client.submit(SPEC)
        launches(self.agent, 2)
        self.url = self.server.url

    def _start(self, *, port: int) -> HubServer:
        data, jobs = self._folder / "data", self._folder / "jobs"
        options = HubOptions(data=data, jobs=jobs, reducers=False, port=port)
        return self._open.enter_context(HubServer(options))

    def token(self, member: str) -> str:
        assert self.server.hub is not None
        auth = self.server.hub.stores.auth
        return self.server.call(auth.issue_job_token(self.job, member=member, attempt=1))

    def as_process(self, member: str) -> HubClient:
        return HubClient(self.url, self.token(member))

    def restart(self) -> None:
        port = self.server.port
        self.close()
        self.server = self._start(port=port)

    def close(self) -> None:
        self._open.close()


@contextlib.contextmanager
def rendezvous_hub(folder: Path) -> Iterator[RendezvousHub]:
    hub = RendezvousHub(folder)
    try:
        yield hub
    finally:
        hub.close()


class Machine:
    """A supervisor that runs, and what it has printed."""

    def __init__(self, process: ChildProcess, lines: list[str]) -> None:
        self.process, self.lines = process, lines

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the ranks that were started here, by rank, the newest."""
        places = [line[line.index("here ") :].split() for line in self.lines if "here " in line]
        return {int(rank): int(pid) for _, rank, pid in places if pid.isdigit()}

    def said(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    async def end(self) -> Exit:
        return await self.process.wait()


class Machines:
    """The machines of the island of w1, each with a folder of its own."""

    def __init__(
        self, hub: RendezvousHub, root: Path, script: str, *, ranks: int = 4, machines: int = 2,
        **island: Any,
    ) -> None:  # fmt: skip
        self._hub, self._root = hub, root
        self.shared = root / "shared"
        self.shared.mkdir()
        self._script = HEAD.format(shared=str(self.shared)) + script
        self._spec = JobSpec(
            job=JobTable(name="job", script="s.py"),
            strategy=StrategyTable(inner="fsdp"),
            island=IslandTable(ranks=ranks, machines=machines, **island),
        )
        self._started: list[Machine] = []

    async def start(self, member: str) -> Machine:
        command = Launch(
            self._hub.job, member, 1, self._hub.token(member), dump_spec(self._spec),
            files={"s.py": self._script},
        )  # fmt: skip
        order = make_order(command, self._root / "machines", hub=self._hub.url)
        lines: list[str] = []
        made = Machine(await ProcessLauncher().start(order, lines.append), lines)
        self._started.append(made)
        return made

    def living(self) -> list[int]:
        """Return the ranks' process ids that live, of all that were ever started."""
        return [pid for one in self._started for pid in one.ranks().values() if alive(pid)]

    def folder(self, member: str) -> Path:
        return self._root / "machines" / self._hub.job / member

    async def close(self) -> None:
        for one in self._started:
            one.process.kill()
            await one.process.wait()


@contextlib.asynccontextmanager
async def machines_of(
    hub: RendezvousHub, root: Path, script: str, **island: Any
) -> AsyncIterator[Machines]:
    """Yield the machines of an island; all that is left of them is killed in the end."""
    made = Machines(hub, root, script, **island)
    try:
        yield made
    finally:
        await asyncio.shield(made.close())


async def all_here(*machines: Machine, ranks: int = 4) -> dict[int, int]:
    """Wait until so many ranks run on these machines; return their process ids."""

    def found() -> dict[int, int]:
        together = {r: pid for one in machines for r, pid in one.ranks().items()}
        return {rank: pid for rank, pid in together.items() if alive(pid)}

    await until(lambda: len(found()) == ranks)
    return found()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, 9)
