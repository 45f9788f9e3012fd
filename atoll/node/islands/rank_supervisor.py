"""The supervisor of an island: starts the ranks of a member and ends them together.

It loads no torch. When a rank dies the island ends, because the other ranks wait for it in
collectives. The hub launches the member again, and the new ranks recover the committed state from
the other members. If an island has several hosts, the supervisor on the first one leads those on
the others: it tells them which ranks to start, receives their exits, and decides for all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from atoll import system
from atoll.config import JobSpec, RankPlace, WorkerEnvironment
from atoll.errors import OutOfMemory, from_dict
from atoll.island.start_phase import RankPhase, describe, on_the_way, started
from atoll.node.islands.failure_cause import RankExit, died, explain, root_cause
from atoll.node.islands.local_ranks import PROGRAM, LocalRanks
from atoll.node.islands.rendezvous import LeaveRequest, LocalExit, NewsQueue, Rendezvous, gather
from atoll.node.islands.rendezvous_server import (
    Follower,
    Joined,
    Left,
    Received,
    RendezvousServer,
)
from atoll.node.islands.restart_history import RestartHistory, spec_with
from atoll.node.islands.supervisor_link import Ended, Finish, Kill, Leaving, Phases, Start
from atoll.node.processes.exits import ERROR_FILE
from atoll.plan.pipelines import read_plans
from atoll.wire.limits import EXIT_LEFT

log = logging.getLogger(__name__)

HERE = "127.0.0.1"
PORT_TRIES = 3  # another process may take the port before rank 0 listens
SETTLE_S = 1.0
"""Wait after the exit of a rank that only noticed the loss of another one, so that the error names
the cause."""
HOME_S = 10.0
"""Time for the other ranks to end after rank 0."""
SLOW_START_S = 30.0
"""Interval of messages about slow ranks at the start, which may include downloads."""
LEAVE_S = 60.0
"""Time for rank 0 to leave when asked; the node agent's own limit is shorter."""


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
    asked = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        asked.set()
        news.put(LeaveRequest())

    signal.signal(signal.SIGTERM, hear)
    machines, folder = spec.island.machines, environment.directory
    first = not RestartHistory.known(folder)
    with contextlib.ExitStack() as open_:
        server = None
        if machines > 1:
            own = RendezvousServer(environment, machines=machines, on_news=news.put)
            server = open_.enter_context(own)

        def run() -> tuple[int, bool]:
            """Run the ranks once; return the status, and whether they trained."""
            plans = read_plans(folder) if spec.island.elastic else {}
            if server is None:
                plan = history.plan(spec, plans)
                shape = plan.mesh if plan else history.shape(spec) or spec.mesh
                rendezvous: Rendezvous | None = Rendezvous(shape, HERE, plan=plan)
            else:
                rendezvous = gather(
                    server, spec, history, first=first, news=news, is_asked=asked.is_set,
                    plans=plans,
                )  # fmt: skip
            if rendezvous is None:
                return EXIT_LEFT, True
            status = _run_ranks(environment, spec, rendezvous, history, program, news, asked)
            return status, not spec.island.elastic or rendezvous.plan is not None

        status, trained = run()
        if status == 0 and not trained:
            status, _ = run()
        return status


def _run_ranks(
    environment: WorkerEnvironment, spec: JobSpec, rendezvous: Rendezvous, history: RestartHistory,
    program: Sequence[str], news: NewsQueue, asked: threading.Event,
) -> int:  # fmt: skip
    folder = environment.directory
    # Late events of the ranks that measured carry smaller numbers.
    before = PORT_TRIES if rendezvous.plan is not None else 0
    for number in range(before, before + PORT_TRIES):
        with free_port(rendezvous.address) as port:
            island = RankSupervisor(
                environment, rendezvous, number=number, program=program, news=news, asked=asked
            )
            began = time.monotonic()
            try:
                island.start(spec, port=port)
                end = island.wait()
            finally:
                island.close()
        if not end.port_taken or asked.is_set():
            break
        log.warning("port %d was taken meanwhile: the ranks start again", port)
    failed = not (end.good or asked.is_set())
    error = None
    if failed:
        error = explain(
            end, member=environment.member, phases=island.phases, timeout_s=spec.island.timeout_s
        )
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        with suppress(OSError):
            (folder / ERROR_FILE).write_text(
                json.dumps(error.to_dict()), encoding="utf-8", newline="\n"
            )
    history.after(
        died=error is not None and died(end, error),
        lacked_memory=isinstance(error, OutOfMemory),
        worked_s=time.monotonic() - began,
    ).write(folder)
    return end.status


class RankSupervisor:
    """The ranks of one start, on all hosts."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        rendezvous: Rendezvous,
        *,
        number: int,
        program: Sequence[str],
        news: NewsQueue,
        asked: threading.Event,
    ) -> None:
        """Prepare start `number`, in which every rank runs `program`.

        `news` receives its events; `asked` is set when this process is asked to leave.
        """
        self._environment, self._rendezvous, self._number = environment, rendezvous, number
        self._news, self._asked = news, asked
        self._local = LocalRanks(
            environment.directory,
            program=program,
            on_end=lambda end: news.put(LocalExit(number, end)),
        )
        runs = rendezvous.runs
        self._own = runs[0]
        self._remote = dict(zip(rendezvous.followers, runs[1:], strict=True))
        """Ranks of each follower host."""
        self._ends: list[RankExit] = []
        self._remote_phases: dict[int, RankPhase] = {}
        self._began, self._starting = time.monotonic(), True
        self._live = set(range(rendezvous.shape.ranks))
        self._elastic = False

    # ------------------------------------------------------------------------- starting

    def start(self, spec: JobSpec, *, port: int) -> None:
        """Start all ranks; rank 0 listens on `port`. Raises JobError if this host cannot."""
        rendezvous, shape = self._rendezvous, self._rendezvous.shape
        machines = 1 + len(self._remote)
        on = f" on {machines} machines" if machines > 1 else ""
        log.info("the island has %d ranks%s: %s", shape.ranks, on, shape)
        for machine, (follower, ranks) in enumerate(self._remote.items(), start=1):
            start = Start(
                number=self._number, mesh=shape.sizes, first=ranks[0], count=len(ranks),
                machine=machine, machines=machines, address=rendezvous.address, port=port,
                plan=rendezvous.plan,
            )  # fmt: skip
            follower.link.send(start)
        places = [
            RankPlace(
                rank,
                shape.ranks,
                local_rank=rank,
                address=rendezvous.address,
                port=port,
                local_ranks=len(self._own),
                machines=machines,
            )
            for rank in self._own
        ]
        self._elastic = spec.island.elastic and rendezvous.plan is not None
        spec_file = spec_with(shape, spec=spec, environment=self._environment, plan=rendezvous.plan)
        self._local.start(places, own_address=rendezvous.address, ATOLL_SPEC=str(spec_file))

    # -------------------------------------------------------------------------- watching

    def wait(self) -> RankExit:
        """Return the exit that decides about the island; other ranks may still run.

        It is that of rank 0, unless another rank has failed by itself before.
        """
        patience: float | None = None
        while True:
            try:
                end = self._next_end(patience)
            except TimeoutError:
                return self._cause()
            if end is None:
                if patience is None:
                    self._local.ask(0)
                    patience = time.monotonic() + LEAVE_S
                continue
            asked = self._asked.is_set()
            if end.rank == 0 and (end.good or asked):
                self._finish()
                return end
            if end.good or asked:
                continue  # the exit of rank 0 decides
            if not (end.follows and self._live):
                return self._cause()
            patience = patience or time.monotonic() + SETTLE_S

    @property
    def phases(self) -> dict[int, RankPhase]:
        """Startup progress of each rank."""
        unknown = {rank: RankPhase() for rank in range(self._rendezvous.shape.ranks)}
        return unknown | self._remote_phases | self._local.phases()

    def _say_who_is_behind(self) -> None:
        """Log the startup progress until all ranks are ready."""
        phases = self.phases
        self._starting = not started(phases)
        if on_the_way(phases):
            waited_s = time.monotonic() - self._began
            log.warning("the island has not begun after %.0f s: %s", waited_s, describe(phases))

    def _get(self, deadline: float | None) -> object:
        """Return the next event, or raise queue.Empty at the deadline; logs a slow start."""
        while True:
            slow_s = SLOW_START_S if self._starting else None
            try:
                return self._news.get(timeout=slow_s if deadline is None else _left_s(deadline))
            except queue.Empty:
                if deadline is not None:
                    raise
                self._say_who_is_behind()

    def _next_end(self, deadline: float | None) -> RankExit | None:
        """Return the next exit, or None if the island is asked to leave; raises TimeoutError."""
        while True:
            try:
                news = self._get(deadline)
            except queue.Empty:
                raise TimeoutError from None
            if isinstance(news, LeaveRequest):
                return None
            if (
                isinstance(news, Received)
                and isinstance(news.word, Leaving)
                and news.follower in self._remote
            ):
                log.info("%s was asked to leave", news.follower.name)
                self._asked.set()
                return None
            if isinstance(news, Joined) and self._grows_by(news.follower):
                log.info("%s has joined: the island saves, and is planned anew", news.follower.name)
                return None
            if isinstance(news, Received) and isinstance(news.word, Phases):
                if news.word.number == self._number:
                    self._remote_phases.update(news.word.ranks)
                continue
            end = self._end_in(news)
            if end is not None:
                self._ends.append(end)
                return end

    def _grows_by(self, follower: Follower) -> bool:
        """Return whether an elastic island that trains should begin again with one host more."""
        return self._elastic and follower not in self._rendezvous.known

    def _end_in(self, news: object) -> RankExit | None:
        """Return the exit that an event reports, if it belongs to this start."""
        end: RankExit | None = None
        if isinstance(news, LocalExit) and news.start == self._number:
            end, gone = news.end, range(news.end.rank, news.end.rank + 1)
        elif isinstance(news, Received) and isinstance(news.word, Ended):
            word, had = news.word, self._remote.get(news.follower, range(0))
            if word.number != self._number or word.rank not in had:
                return None
            error = from_dict(word.error) if word.error else None
            end = RankExit(word.rank, word.code, error, word.oom_kills, follower=news.follower.name)
            gone = range(word.rank, word.rank + 1)
        elif isinstance(news, Left) and news.follower in self._remote:
            gone = self._remote[news.follower]
            if self._live.isdisjoint(gone):
                return None
            end = RankExit.of_lost_machine(
                news.follower.name, had=gone, ranks=self._rendezvous.shape.ranks, why=news.why
            )
        if end is not None:
            self._live.difference_update(gone)
            level = logging.INFO if end.good else logging.WARNING
            log.log(level, "rank %d has ended with %d", end.rank, end.code)
        return end

    def _cause(self) -> RankExit:
        """Return the causing exit; a rank 0 that did not leave counts as killed."""
        if all(end.good for end in self._ends):
            return RankExit(0, -system.KILL)
        return root_cause(self._ends)

    def _finish(self) -> None:
        for follower in self._remote:
            follower.link.send(Finish())
        deadline = time.monotonic() + HOME_S
        with suppress(TimeoutError):
            while self._live:
                self._next_end(deadline)

    # ---------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Kill all ranks, and wait until those on this host are gone."""
        for follower in self._remote:
            follower.link.send(Kill())
        self._local.close()


@contextmanager
def free_port(address: str = HERE) -> Iterator[int]:
    """Yield a port of this host that the system assigns to no other process meanwhile.

    A socket that is bound but does not listen reserves it, while a process that names the port
    can still listen there. Systems without that behaviour get a port that was free just now.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        port = int(held.getsockname()[1])
        if not sys.platform.startswith("linux"):
            held.close()
        yield port


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
