"""The supervisor on a follower host: runs ranks on behalf of the first host's supervisor.

It loads no torch and is not a member of the job. It asks the hub only for the address of its
leader. It runs until the node agent ends it: when its leader is lost it kills its ranks and waits
for the next one.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from atoll.config import JobSpec, MeshShape, RankPlace, WorkerEnvironment
from atoll.errors import AtollError
from atoll.ids import member_of_follower
from atoll.island.start_phase import RankPhase, started
from atoll.net.endpoint import endpoint_of
from atoll.net.http.client import HubClient
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.local_ranks import PROGRAM, LocalRanks
from atoll.node.islands.rendezvous_client import RendezvousClient
from atoll.node.islands.restart_history import spec_with
from atoll.node.islands.supervisor_link import (
    Ended,
    Finish,
    Kill,
    Leaving,
    Phases,
    Release,
    Start,
    SupervisorLink,
    Word,
)
from atoll.node.machine.interfaces import address_towards
from atoll.wire.limits import EXIT_LEFT

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of requests for the address of the rendezvous server."""
HUB_TIMEOUT_S = 5.0
HOME_S = 10.0
"""Time for the ranks to end after rank 0."""
PHASES_S = 1.0
"""Interval of checks of the ranks' startup progress."""
LEAVE_S = 60.0
"""Time for rank 0 to leave when this host is asked to."""


@dataclass(frozen=True, slots=True)
class _LeaveRequest:
    """The node agent asks this process to leave."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The leader was lost."""

    why: str


@dataclass(frozen=True, slots=True)
class _End:
    """A rank on this host has ended."""

    start: int
    """Number of its start."""
    end: RankExit


_News: TypeAlias = Word | _End | _LeaveRequest | _Lost


def serve_island(
    environment: WorkerEnvironment, spec: JobSpec, *, program: Sequence[str] = PROGRAM
) -> int:
    """Serve as a follower host until asked to leave; return the exit status.

    Call it in the main thread: ranks die with the thread that started them. Every rank runs
    `program`.

    Raises:
        JobError: the first host runs but cannot be reached.
        AuthError: the hub no longer knows this process.
    """
    leaving = threading.Event()
    serving: list[FollowerSupervisor] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        leaving.set()
        for follower in serving:
            follower.ask()

    signal.signal(signal.SIGTERM, on_signal)
    with HubClient(
        environment.hub,
        environment.token,
        endpoint=endpoint_of(environment),
        timeout_s=HUB_TIMEOUT_S,
    ) as client:
        search = RendezvousClient(environment, client)
        while not leaving.is_set():
            link = search.look()
            if link is None:
                leaving.wait(LOOK_S)
                continue
            follower = FollowerSupervisor(environment, spec, link, program=program)
            serving[:] = [follower]
            if leaving.is_set():
                follower.ask()
            if follower.serve():
                search.pass_by(search.key)
    return EXIT_LEFT


class FollowerSupervisor:
    """The ranks on this host, under one leader."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        spec: JobSpec,
        link: SupervisorLink,
        *,
        program: Sequence[str],
    ) -> None:
        self._environment, self._spec = environment, spec
        self._link, self._program = link, program
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._leaving = self._started = False
        self._number = -1
        self._local: LocalRanks | None = None
        self._live: set[int] = set()
        self._patience: float | None = None
        self._phases: dict[int, RankPhase] = {}
        """As last reported to the leader."""
        self._ready = True

    def ask(self) -> None:
        """Ask it to leave; from any thread, and from a signal handler."""
        self._news.put(_LeaveRequest())

    def serve(self) -> bool:
        """Obey the leader until it is lost, or this process is asked to leave.

        Returns whether ranks were started; if so, do not connect to this leader again.
        """
        self._link.run(self._news.put, lambda why: self._news.put(_Lost(why)))
        try:
            while not (self._leaving and not self._live):
                news = self._next()
                if isinstance(news, _Lost):
                    log.info("the first machine is gone: %s", news.why)
                    break
                self._take(news)
        finally:
            self._kill()
            self._link.close()
        return self._started

    def _next(self) -> _News | None:
        """Return the next event; None: the time for ranks to end is over."""
        while True:
            left_s = None if self._patience is None else self._patience - time.monotonic()
            look_s = None if self._ready else PHASES_S
            pauses = [max(0.0, pause) for pause in (left_s, look_s) if pause is not None]
            try:
                return self._news.get(timeout=min(pauses, default=None))
            except queue.Empty:
                if left_s is not None and left_s <= 0:
                    return None
                self._send_phases()

    def _send_phases(self) -> None:
        """Report the startup progress of the ranks to the leader, if it has changed."""
        phases = self._local.phases() if self._local is not None else {}
        if phases != self._phases:
            self._phases = phases
            self._link.send(Phases(number=self._number, ranks=phases))
        self._ready = started(phases)

    def _take(self, news: _News | None) -> None:
        if isinstance(news, Start):
            if news.plan is None:
                self._kill()
            self._start(news)
        elif isinstance(news, _End):
            if news.start == self._number:
                self._send_end(news.end)
        elif isinstance(news, Finish):
            self._patience = time.monotonic() + HOME_S
        elif isinstance(news, _LeaveRequest):
            self._leaving = True
            if self._live:  # rank 0 has to save their common state first
                self._link.send(Leaving())
                self._patience = time.monotonic() + LEAVE_S
        elif isinstance(news, Release):
            self._number = -1  # ignore the exits that follow
            if self._local is not None:
                self._local.release()
        elif news is None or isinstance(news, Kill):
            self._kill()

    def _start(self, start: Start) -> None:
        self._started, self._number, self._ready = True, start.number, False
        ranks = range(start.first, start.first + start.count)
        self._live = set(ranks)
        log.info("ranks %d to %d start here; they meet at %s", ranks[0], ranks[-1], start.address)
        if self._local is None:
            self._local = LocalRanks(
                self._environment.directory,
                program=self._program,
                on_end=lambda end: self._news.put(_End(self._number, end)),
            )
        try:
            spec_file = spec_with(
                MeshShape(*start.mesh), spec=self._spec, environment=self._environment,
                plan=start.plan,
            )  # fmt: skip
            self._local.start(
                _places(start),
                own_address=address_towards(start.address, start.port) or start.address,
                spec_file=spec_file,
                number=start.number,
                ordered=start.plan is not None,
                planned=start.planned,
                ATOLL_MEMBER=member_of_follower(self._environment.member)[0],
            )
        except AtollError as error:
            self._send_end(RankExit(ranks[0], 1, error))

    def _send_end(self, end: RankExit) -> None:
        self._live.discard(end.rank)
        self._send_phases()
        level = logging.INFO if end.good else logging.WARNING
        log.log(level, "rank %d has ended with %d", end.rank, end.code)
        ended = Ended(
            number=self._number,
            rank=end.rank,
            code=end.code,
            error=end.error.to_dict() if end.error else None,
            oom_kills=end.oom_kills,
        )
        self._link.send(ended)

    def _kill(self) -> None:
        self._number, self._patience = -1, None  # ignore the exits that follow
        if self._local is not None:
            self._local.close()
            self._local = None
        self._live, self._phases, self._ready = set(), {}, True


def _places(start: Start) -> list[RankPlace]:
    return [
        RankPlace(
            start.first + local,
            MeshShape(*start.mesh).ranks,
            local_rank=local,
            address=start.address,
            port=start.port,
            local_ranks=start.count,
            machine=start.machine,
            machines=start.machines,
        )
        for local in range(start.count)
    ]
