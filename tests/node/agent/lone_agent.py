"""An agent in this process, with a hub that only hands out commands and writes down reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

from atoll.config import JobSpec, JobTable, dump_spec
from atoll.errors import AuthError
from atoll.net.link import Link
from atoll.node.agent.agent import Agent
from atoll.node.identity.identity import Identity
from atoll.wire.messages import (
    Acked,
    Done,
    Launch,
    LogLines,
    Message,
    ProcessState,
    QueueAck,
    QueueClaim,
    QueueItem,
    QueueItems,
    Stop,
    pack_command,
)
from tests.node.launchers.ordering import until


class Hub:
    """Stands in for the link to a hub."""

    connected = True
    failed = None
    session = "n"
    refuses_lines = False

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.acked = 0
        self._commands: asyncio.Queue[Launch | Stop] = asyncio.Queue()
        self._reconnected: Callable[[], None] = lambda: None

    def on_notice(self, handler: Callable[[Message], None]) -> None:
        pass

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        self._reconnected = handler

    def reconnect(self) -> None:
        self._reconnected()

    async def request(self, body: Message, *, timeout_s: float) -> Message:
        if isinstance(body, QueueClaim):
            command = await self._commands.get()
            return QueueItems([QueueItem(1, "key", pack_command(command), 1, "lease")])
        if isinstance(body, QueueAck):
            self.acked += 1
            return Done()
        self.received.append(body)
        if isinstance(body, LogLines) and self.refuses_lines:
            raise AuthError("this process belongs to another")
        if isinstance(body, LogLines):
            return Acked(body.seq + len(body.lines) - 1)
        return Done()

    def put(self, command: Launch | Stop) -> None:
        self._commands.put_nowait(command)

    @property
    def lines(self) -> list[str]:
        """Every line that was shipped, in order."""
        return [line for body in self.received if isinstance(body, LogLines) for line in body.lines]

    def states(self, member: str = "w1") -> list[str]:
        return [state.state for state in self._states(member)]

    def end(self, member: str = "w1") -> ProcessState | None:
        ends = [state for state in self._states(member) if state.state == "exited"]
        return ends[-1] if ends else None

    async def ended(self, member: str = "w1") -> ProcessState:
        """Wait until a process has ended, and return what was reported of it."""
        await until(lambda: self.end(member))
        return cast(ProcessState, self.end(member))

    def _states(self, member: str) -> list[ProcessState]:
        mine = [body for body in self.received if isinstance(body, ProcessState)]
        return [state for state in mine if state.member == member]


class Failures(logging.Handler):
    """Keeps the exceptions with which tasks of the agent have failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")


@contextlib.asynccontextmanager
async def lone_agent(home: Path, **options: Any) -> AsyncIterator[tuple[Agent, Hub]]:
    """Yield an agent that serves, and its hub; no task of the agent may fail meanwhile."""
    failures = Failures()
    logging.getLogger("atoll.node.agent.reports").addHandler(failures)
    hub = Hub()
    identity = Identity(hub="http://127.0.0.1:1", node="n", token="")
    agent = Agent(cast(Link, hub), identity, home=home, **options)
    serving = asyncio.create_task(agent.serve())
    try:
        yield agent, hub
    finally:
        serving.cancel()
        await agent.leave(grace_s=0.2)
        await asyncio.gather(serving, return_exceptions=True)
        logging.getLogger("atoll.node.agent.reports").removeHandler(failures)
    assert not failures.found


def launch(spec: JobSpec, *, member: str = "w1", token: str = "t1", **files: str) -> Launch:
    """Return the command to start a process; files are named without their ending `.py`."""
    texts = {f"{name}.py": text for name, text in files.items()}
    return Launch("job-1", member, 1, token, dump_spec(spec), files=texts)


def program(*words: str, **job: Any) -> JobSpec:
    """Return a job that runs a program."""
    return JobSpec(job=JobTable(name="job", command=list(words), **job))
