"""One launch of a member on this machine, from the command to the report of its exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.config import parse_spec
from atoll.config.redaction import Redaction
from atoll.errors import AtollError, JobError
from atoll.ids import check_name, is_follower, is_reducer
from atoll.net.http.client import HubClient
from atoll.node.agent.artifacts import collect
from atoll.node.agent.log_shipping import Key
from atoll.node.agent.options import Machine
from atoll.node.agent.workspace import Workspace
from atoll.node.availability.quiet_hours import check_allowed
from atoll.node.launchers.folder import lay_out
from atoll.node.launchers.launcher import GONE_S, Exit, Order, Process
from atoll.node.launchers.resources import device_of
from atoll.node.launchers.sandbox import check_possible
from atoll.node.processes.output import TAIL_LINES
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import Launch, ProcessState
from atoll.wire.states import ProcessPhase

log = logging.getLogger(__name__)

PROGRAMS = ("command", "container")
"""Kinds of job with programs that need not register with the hub."""

EXIT_FAILED = 1
"""Reported exit status of a process that could not be started."""

ARTIFACTS_S = 120.0
"""Time limit for uploading the artifacts of a process."""

LAST_LINES_S = 5.0
"""How long the last lines may delay the report of the exit."""


@dataclass(frozen=True, slots=True)
class _Begun:
    process: Process
    order: Order
    prepared: Workspace


class Attempt:
    """Prepares, runs and ends one process; can be stopped at any time."""

    def __init__(self, command: Launch, machine: Machine, *, former: Attempt | None) -> None:
        """Start the preparation; see `run`. `former` must be gone before this process starts."""
        self.command = command
        self.stopping = False
        self.leaving = False
        """Stopped because this machine goes away, not because its job ends."""
        self.replaced = False
        """A newer process of the same member takes its place."""
        self._machine = machine
        self._former = former
        self._process: Process | None = None
        self._secrets: Mapping[str, str] = {}
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._reported = machine.reports.process(command, ProcessPhase.STARTING)
        self._line = machine.lines.open(self.key)
        self._beginning = machine.reports.spawn(self._begin())
        self._begun: _Begun | None = None
        self._collected = asyncio.Event()
        self._collected.set()
        """Cleared while artifacts of a failed process are sent."""
        self._unbegun = Exit(-signal.SIGTERM, None, [])
        """Exit of a process that never started: stopped, unless it failed."""

    @property
    def key(self) -> Key:
        """Job and member."""
        return self.command.job, self.command.member

    @property
    def child(self) -> int | None:
        """Id of the running child process, if any."""
        process = self._process
        return process.pid if process is not None and process.child else None

    async def run(self) -> None:
        """Run the process to its end and report its exit to the hub.

        A clean exit is reported after the upload of the artifacts, so that a finished job has them.
        A failure is reported at once, because the other members wait for this one until the hub
        drops it; a second report follows the upload. The exit of a replaced process is not
        reported.
        """
        lines = self._machine.lines
        try:
            ended = await self._live()
            log.info("%s %s ended with %d", *self.key, ended.code)
            pending = self._leaves_artifacts()
            if pending and ended.code == 0:
                await self._collect(pending)
                pending = None
            await lines.flush(self.key, timeout_s=LAST_LINES_S)
            # Reports are independent tasks: the hub must learn of the start before the exit.
            await asyncio.wait([self._reported])
            if not self.replaced:
                await self._report(ended, collecting=pending is not None)
            if pending:
                await self._collect(pending)
                await lines.flush(self.key, timeout_s=LAST_LINES_S)
                await self._report(ended)
        finally:
            self._collected.set()
            if self._begun is not None:
                self._machine.preparer.release(self._begun.prepared)
        await lines.end(self.key, timeout_s=LAST_LINES_S)

    def _leaves_artifacts(self) -> _Begun | None:
        """Return the process if its artifacts are wanted; a newer launch waits for the upload."""
        begun = self._begun
        if begun is None or not begun.order.spec.job.artifacts:
            return None
        if self.replaced or self.leaving or is_reducer(self.command.member):
            return None
        self._collected.clear()
        return begun

    async def _report(self, ended: Exit, *, collecting: bool = False) -> None:
        hide = Redaction(self._secrets)
        error = hide.fields(ended.error.to_dict()) if ended.error and not self.stopping else None
        report = self._machine.reports.process(
            self.command,
            ProcessPhase.EXITED,
            exit_code=EXIT_LEFT if self.leaving and ended.code else ended.code,
            error=error,
            tail=ended.tail if error is not None else [],
            collecting=collecting,
        )
        await asyncio.wait([report])

    async def stop(self, *, grace_s: float, leaving: bool = False) -> None:
        """Ask it to end, or cancel its start; kill it after `grace_s`."""
        self.stopping = True
        self.leaving = self.leaving or leaving
        if self._process is None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning], timeout=GONE_S)
        if self._process is not None:
            await self._process.stop(grace_s=grace_s)

    async def replace(self) -> None:
        """Kill it and wait for the upload of its artifacts: its successor uses the same folder."""
        self.replaced = True
        log.info("%s %s is killed: a newer process takes its place", *self.key)
        await self.stop(grace_s=0.0)
        await self._collected.wait()

    def kill(self) -> None:
        """Kill it without waiting."""
        self.stopping = True
        self._beginning.cancel()
        if self._process is not None:
            self._process.kill()

    async def _live(self) -> Exit:
        machine = self._machine
        await asyncio.wait([self._beginning])
        begun = self._begun
        if begun is None:
            return self._unbegun
        try:
            return await begun.process.wait()
        finally:
            machine.watch.remove(begun.process)
            machine.shares.give_back(begun.order.caps)

    async def _collect(self, begun: _Begun) -> None:
        order, client = begun.order, self._machine.client
        work = collect(order.spec, begun.prepared, order.command, client, self._line)
        try:
            await asyncio.wait_for(work, ARTIFACTS_S)
        except TimeoutError:
            self._line(f"[artifacts] given up after {ARTIFACTS_S:.0f} s: not all are at the hub")

    async def _begin(self) -> None:
        """Prepare and start the process, or record why it cannot be started."""
        try:
            if self._former is not None:
                await self._former.replace()
                self._former = None
            await self._start()
        except Exception as error:  # a faulty job must not end the agent
            if isinstance(error, AtollError):
                cause = error
                log.error("%s %s was not started: %s", *self.key, error)
            else:
                log.exception("%s %s was not started", *self.key)
                cause = JobError(
                    f"{self.command.member} was not started",
                    given=f"{type(error).__name__}: {error}",
                    remedy="see the log of the node's agent",
                )
            self._unbegun = Exit(EXIT_FAILED, cause, list(self._said))

    async def _start(self) -> None:
        machine, command, member = self._machine, self.command, self.command.member
        for kind, name in (("job", command.job), ("member", member)):
            check_name(kind, name)  # they become folders
        spec = parse_spec(command.spec, name=f"the job {command.job}")
        mounts = check_allowed(
            spec, member=member, offer=machine.offer, trusted_keys=machine.trusted_keys
        )
        sandbox = None
        if machine.sandbox and spec.launch.launcher == "process" and not is_reducer(member):
            sandbox = machine.sandbox
            await asyncio.to_thread(check_possible, spec, sandbox)
        directory = machine.jobs / command.job / member
        variables = lay_out(
            command, directory=directory, hub=machine.hub, endpoint=machine.endpoint,
            device=device_of(spec, machine.offer),
            hub_only=sandbox is not None and sandbox.network == "hub",
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            prepared = Workspace(directory, Path(sys.executable))
            if not is_reducer(member):
                prepared = await machine.preparer.prepare(
                    command, spec, directory=directory, on_line=self._say
                )
                undo.callback(machine.preparer.release, prepared)
                if spec.launch.secrets:
                    self._secrets = await asyncio.to_thread(self._fetch_secrets)
            caps = machine.shares.take(spec, member=member, offer=machine.offer, nice=machine.nice)
            undo.callback(machine.shares.give_back, caps)
            order = Order(
                command=command,
                spec=spec,
                directory=directory,
                folder=prepared.folder,
                python=prepared.python,
                variables=variables,
                caps=caps,
                mounts=tuple(mounts),
                sandbox=sandbox,
                secrets=self._secrets,
            )
            kind = "process" if is_reducer(member) else spec.launch.launcher
            process = await machine.launcher(kind).start(order, self._line)
            undo.pop_all()
        self._process, self._begun = process, _Begun(process, order, prepared)
        log.info("%s %s runs as %s", *self.key, process.name)
        machine.watch.add(
            process, member=member, limit_bytes=caps.memory_bytes, limit_from=caps.memory_from
        )
        if is_follower(member) or (not is_reducer(member) and spec.kind in PROGRAMS):
            self._reported = machine.reports.spawn(self._tell_running(self._reported))

    def _fetch_secrets(self) -> Mapping[str, str]:
        """Return the values of the job's secrets; only the job's own token may read them."""
        machine, command = self._machine, self.command
        with HubClient(machine.hub, command.token, endpoint=machine.endpoint) as client:
            return client.secrets_of(command.job)

    async def _tell_running(self, starting: asyncio.Task[None]) -> None:
        """Report `running` for processes that do not register with the hub."""
        await asyncio.wait([starting])
        job, member = self.key
        body = ProcessState(job, member, ProcessPhase.RUNNING, attempt=self.command.attempt)
        await self._machine.reports.deliver(body)

    def _say(self, line: str) -> None:
        self._said.append(line)
        self._line(line)
