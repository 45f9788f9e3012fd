"""The supervisor of an island: starts the ranks of a member and ends them together.

It loads no torch. When a rank dies the island ends, because the other ranks wait for it in
collectives. The hub launches the member again, and the new ranks recover the committed state from
the other members. Only an elastic island continues, as long as rank 0 lives: its processes stay and
form another mesh. If a host joins, or announces that it leaves, they do so after a round and keep
their state. If an island has several hosts, the supervisor on the first one leads those on the
others: it orders which ranks to start, receives their exits, and decides for all.
"""

from __future__ import annotations

import functools
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from atoll import system
from atoll.config import JobSpec, RankPlace, WorkerEnvironment
from atoll.errors import from_dict
from atoll.island.start_phase import RankPhase, StartPhase, describe, on_the_way, started
from atoll.node.islands.failure_cause import RankExit, root_cause
from atoll.node.islands.local_ranks import LocalRanks
from atoll.node.islands.rendezvous import LeaveRequest, LocalExit, NewsQueue, Rendezvous
from atoll.node.islands.rendezvous_server import (
    Follower,
    Joined,
    Left,
    Received,
)
from atoll.node.islands.restart_history import spec_with
from atoll.node.islands.supervisor_link import (
    Ended,
    Finish,
    Kill,
    Leaving,
    Phases,
    Release,
    Start,
)

log = logging.getLogger(__name__)

HERE = "127.0.0.1"
SETTLE_S = 1.0
"""Wait after the exit of a rank that only noticed the loss of another one, so that the error names
the cause."""
HOME_S = 10.0
"""Time for the other ranks to end after rank 0."""
SLOW_START_S = 30.0
"""Interval of messages about slow ranks at the start, which may include downloads."""
LEAVE_S = 60.0
"""Time for rank 0 to leave when asked; the node agent's own limit is shorter."""


@dataclass(frozen=True, slots=True)
class MachineChange:
    """A machine has come, or is about to leave, while all ranks live."""

    follower: Follower
    leaves: bool


class RankSupervisor:
    """The ranks of an island on all hosts, from one start to the next; processes may stay."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        rendezvous: Rendezvous,
        *,
        number: int,
        program: Sequence[str],
        news: NewsQueue,
        leaving: threading.Event,
    ) -> None:
        """Prepare start `number`, in which every rank runs `program`.

        `news` receives its events; `leaving` is set when this process is asked to leave.
        """
        self._environment = environment
        self._news, self._leaving = news, leaving
        self._remote: dict[Follower, range] = {}
        self._local = LocalRanks(
            environment.directory,
            program=program,
            on_end=lambda end: news.put(LocalExit(self._number, end)),
        )
        self._prepare(rendezvous, number, planned=False)

    def _prepare(self, rendezvous: Rendezvous, number: int, *, planned: bool) -> None:
        self._rendezvous, self._number = rendezvous, number
        for follower in self._remote.keys() - set(rendezvous.followers):
            follower.link.send(Release() if planned else Kill())
        self._stayed = frozenset(self._remote)
        """Hosts that had ranks before."""
        runs = rendezvous.runs
        self._own = runs[0]
        self._remote = dict(zip(rendezvous.followers, runs[1:], strict=True))
        """Ranks of each follower host."""
        self._ends: list[RankExit] = []
        self._remote_phases: dict[int, RankPhase] = {}
        self._began, self._starting = time.monotonic(), True
        self._live = set(range(rendezvous.shape.ranks))
        self._elastic = False
        self._order: Callable[[], None] | None = None
        """Starts and orders the ranks of this host; None: it is done."""
        self._awaited: frozenset[int] = frozenset()
        """Ranks on new hosts that must have loaded before `_order` runs."""
        self._until: float | None = None
        """Deadline for further exits; None: no rank has failed or was asked to leave."""

    # ------------------------------------------------------------------------- starting

    def may_morph(self, end: RankExit) -> bool:
        """Return whether the ranks that live can go on without the one that has ended."""
        return (
            self._elastic and not self._leaving.is_set() and end.rank != 0 and self._local.lives(0)
        )

    def morph(
        self, rendezvous: Rendezvous, spec: JobSpec, *, port: int, planned: bool = False
    ) -> None:
        """Let the ranks that live, and new ones, go on by another plan; raises JobError.

        Rank 0 keeps its process, and with it the session of the member. If `planned`, no rank was
        lost: they go on after their round, and those that have no place end then.
        """
        self._prepare(rendezvous, self._number + 1, planned=planned)
        self.start(spec, port=port, planned=planned)

    def goes_on_with(self, rendezvous: Rendezvous) -> bool:
        """Return whether plan and hosts are unchanged; if so, record which hosts are known."""
        now = self._rendezvous
        same = (now.plan, now.followers) == (rendezvous.plan, rendezvous.followers)
        self._rendezvous = replace(now, known=rendezvous.known) if same else now
        return same

    def leave(self, change: MachineChange) -> None:
        """Ask rank 0 to save and end: the ranks cannot go on in another mesh."""
        if change.leaves:
            self._leaving.set()
        self._ask()

    def _ask(self) -> None:
        if self._until is None:
            self._local.ask(0)
            self._until = time.monotonic() + LEAVE_S

    def start(self, spec: JobSpec, *, port: int, planned: bool = False) -> None:
        """Start all ranks; rank 0 listens on `port`. Raises JobError if this host cannot."""
        rendezvous, shape = self._rendezvous, self._rendezvous.shape
        fresh = [ranks for follower, ranks in self._remote.items() if follower not in self._stayed]
        self._awaited = frozenset(rank for ranks in fresh for rank in ranks if planned)
        machines = 1 + len(self._remote)
        on = f" on {machines} machines" if machines > 1 else ""
        log.info("the island has %d ranks%s: %s", shape.ranks, on, shape)
        for machine, (follower, ranks) in enumerate(self._remote.items(), start=1):
            start = Start(
                number=self._number, mesh=shape.sizes, first=ranks[0], count=len(ranks),
                machine=machine, machines=machines, address=rendezvous.address, port=port,
                plan=rendezvous.plan, planned=planned,
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
        self._order = functools.partial(
            self._local.start, places, own_address=rendezvous.address, spec_file=spec_file,
            number=self._number, ordered=self._elastic, planned=planned,
        )  # fmt: skip
        self._order_when_ready()

    def _order_when_ready(self) -> None:
        """Order the ranks of this host to the new mesh once new hosts have loaded."""
        loading = {
            rank
            for rank in self._awaited
            if self._remote_phases.get(rank, RankPhase()).phase is StartPhase.LOADING
        }
        if self._order is not None and not loading:
            order, self._order = self._order, None
            order()

    # -------------------------------------------------------------------------- watching

    def wait(self) -> RankExit | MachineChange:
        """Return the exit that decides about the island; other ranks may still run.

        It is that of rank 0, unless another rank has failed by itself before. If the hosts of an
        elastic island change while it trains, return that change instead; then wait again.
        """
        while True:
            try:
                end = self._next_end(self._until)
            except TimeoutError:
                return self._cause()
            if isinstance(end, MachineChange):
                return end
            if end is None:
                self._ask()
                continue
            leaving = self._leaving.is_set()
            if end.rank == 0 and (end.good or leaving):
                self._finish()
                return end
            if end.good or leaving:
                continue  # the exit of rank 0 decides
            if not (end.follows and self._live):
                return self._cause()
            self._until = self._until or time.monotonic() + SETTLE_S

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

    def _next_end(self, deadline: float | None) -> RankExit | MachineChange | None:
        """Return the next exit or change, or None if the island is asked to leave.

        Raises TimeoutError at the deadline.
        """
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
                if self._elastic and deadline is None:
                    return MachineChange(news.follower, leaves=True)
                self._leaving.set()
                return None
            if isinstance(news, Joined) and self._grows_by(news.follower) and deadline is None:
                log.info("%s has joined: the island is planned anew", news.follower.name)
                return MachineChange(news.follower, leaves=False)
            if isinstance(news, Received) and isinstance(news.word, Phases):
                if news.word.number == self._number:
                    self._remote_phases.update(news.word.ranks)
                    self._order_when_ready()
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
