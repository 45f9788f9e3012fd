"""The process of a member that is an island: starts its ranks, and decides how they start again.

It loads no torch. A start ends with the exit that decides about the island; the member then ends,
and the hub launches it again. An elastic island continues instead as long as rank 0 lives, with the
hosts that are connected, and grows when hosts join.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from atoll.config import JobSpec, WorkerEnvironment
from atoll.errors import AtollError, OutOfMemory
from atoll.node.islands.failure_cause import RankExit, died, explain
from atoll.node.islands.local_ranks import PROGRAM
from atoll.node.islands.rank_supervisor import HERE, MachineChange, RankSupervisor, free_port
from atoll.node.islands.rendezvous import (
    LeaveRequest,
    NewsQueue,
    Rendezvous,
    gather,
    with_those_here,
)
from atoll.node.islands.rendezvous_server import RendezvousServer
from atoll.node.islands.restart_history import RestartHistory
from atoll.node.processes.exits import ERROR_FILE
from atoll.plan.pipelines import PipelinePlan, read_plans
from atoll.wire.limits import EXIT_LEFT

log = logging.getLogger(__name__)

PORT_TRIES = 3  # another process may take the port before rank 0 listens


@dataclass(frozen=True)
class _Hosts:
    """The hosts of an island, and what its next start looks like."""

    spec: JobSpec
    folder: Path
    server: RendezvousServer | None
    """None: all ranks are on this host."""
    first: bool
    """The island has not started before."""
    news: NewsQueue
    leaving: threading.Event

    @property
    def _plans(self) -> dict[int, PipelinePlan]:
        return read_plans(self.folder) if self.spec.island.elastic else {}

    def _of_one(self, history: RestartHistory) -> Rendezvous:
        plan = history.plan(self.spec, self._plans)
        shape = plan.mesh if plan else history.shape(self.spec) or self.spec.mesh
        return Rendezvous(shape, HERE, plan=plan)

    def gathered(self, history: RestartHistory) -> Rendezvous | None:
        """Wait for hosts; return the ranks of the next start, or None when asked to leave."""
        if self.server is None:
            return self._of_one(history)
        return gather(
            self.server, self.spec, history, first=self.first, news=self.news,
            should_stop=self.leaving.is_set, plans=self._plans,
        )  # fmt: skip

    def here(self, history: RestartHistory) -> Rendezvous | None:
        """Return the ranks of the next start by a plan for the hosts that are here, if any."""
        if self.server is None:
            found: Rendezvous | None = self._of_one(history)
        else:
            found = with_those_here(self.server, self.spec, history, plans=self._plans)
        return found if found is not None and found.plan is not None else None

    def changed(self, change: MachineChange, history: RestartHistory) -> Rendezvous | None:
        """Return the ranks after a change; None: the hosts that are left cannot go on."""
        if change.leaves and self.server is not None:
            self.server.dismiss(change.follower)
        return self.here(history)


def supervise(
    environment: WorkerEnvironment, spec: JobSpec, *, program: Sequence[str] = PROGRAM
) -> int:
    """Run the ranks of an island, each with `program`, to their end; return the exit status.

    Call it in the main thread: ranks die with the thread that started them.

    Raises:
        JobError: a host cannot start so many processes, or the others cannot reach this one.
    """
    history = RestartHistory.read(environment.directory)
    news: NewsQueue = queue.SimpleQueue()
    leaving = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        leaving.set()
        news.put(LeaveRequest())

    signal.signal(signal.SIGTERM, on_signal)
    machines, folder = spec.island.machines, environment.directory
    first = not RestartHistory.known(folder)
    with contextlib.ExitStack() as open_:
        server = None
        if machines > 1:
            log.warning(
                "what the ranks exchange between the %d machines is not encrypted: use a network "
                "that you trust, or a VPN such as WireGuard", machines,
            )  # fmt: skip
            own = RendezvousServer(environment, machines=machines, on_news=news.put)
            server = open_.enter_context(own)

        hosts = _Hosts(spec, folder, server, first, news, leaving)

        def run() -> tuple[int, bool]:
            """Run the ranks once; return the status, and whether they trained."""
            rendezvous = hosts.gathered(history)
            if rendezvous is None:
                return EXIT_LEFT, True
            status = _run_ranks(environment, rendezvous, history, hosts, program)
            return status, not spec.island.elastic or rendezvous.plan is not None

        status, trained = run()
        if status == 0 and not trained:
            status, _ = run()
        return status


def _run_ranks(
    environment: WorkerEnvironment, rendezvous: Rendezvous, history: RestartHistory, hosts: _Hosts,
    program: Sequence[str],
) -> int:  # fmt: skip
    folder, spec, news, leaving = environment.directory, hosts.spec, hosts.news, hosts.leaving

    def cause(island: RankSupervisor, end: RankExit) -> tuple[AtollError, RestartHistory]:
        """Return the error of an exit, and the history after it."""
        error = explain(
            end, member=environment.member, phases=island.phases, timeout_s=spec.island.timeout_s
        )
        after = history.after(
            died=died(end, error), lacked_memory=isinstance(error, OutOfMemory),
            worked_s=time.monotonic() - began,
        )  # fmt: skip
        return error, after

    # Late events of the ranks that measured carry smaller numbers.
    before = PORT_TRIES if rendezvous.plan is not None else 0
    for number in range(before, before + PORT_TRIES):
        with contextlib.ExitStack() as ports:
            port = ports.enter_context(free_port(rendezvous.address))
            island = RankSupervisor(
                environment, rendezvous, number=number, program=program, news=news, leaving=leaving
            )
            began = time.monotonic()
            try:
                island.start(spec, port=port)
                while True:
                    end = _exit_of(island, hosts, history, ports)
                    if not island.may_morph(end):
                        break
                    error, after = cause(island, end)
                    next_one = hosts.here(after) if after.row else None
                    if next_one is None:
                        break
                    history = after
                    history.write(folder)
                    log.warning("%s; the others go on: %s", error, next_one.shape)
                    began = time.monotonic()
                    port = ports.enter_context(free_port(next_one.address))
                    island.morph(next_one, spec, port=port)
            finally:
                island.close()
        if not end.port_taken or leaving.is_set():
            break
        log.warning("port %d was taken meanwhile: the ranks start again", port)
    if end.good or leaving.is_set():
        RestartHistory().write(folder)
        return end.status
    error, after = cause(island, end)
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    with suppress(OSError):
        (folder / ERROR_FILE).write_text(
            json.dumps(error.to_dict()), encoding="utf-8", newline="\n"
        )
    after.write(folder)
    return end.status


def _exit_of(
    island: RankSupervisor, hosts: _Hosts, history: RestartHistory, ports: contextlib.ExitStack
) -> RankExit:
    """Return the exit that decides; until then, order another mesh whenever the hosts change."""
    while isinstance(found := island.wait(), MachineChange):
        next_one = hosts.changed(found, history)
        if next_one is None:
            island.leave(found)
        elif not island.goes_on_with(next_one):
            log.info("the ranks go on after their round: %s", next_one.shape)
            port = ports.enter_context(free_port(next_one.address))
            island.morph(next_one, hosts.spec, port=port, planned=True)
    return found
