"""Waits for the hosts of an island, and decides which ranks each of them gets."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from atoll.config import JobSpec, MeshShape, split_ranks
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.rendezvous_server import Follower, FollowerNews, RendezvousServer
from atoll.node.islands.restart_history import RestartHistory
from atoll.plan.pipelines import PipelinePlan

log = logging.getLogger(__name__)

FOLLOWERS_S = 30.0
"""With `on_loss = "shrink"`: how long a restarted island waits for lost hosts."""
FIRST_FOLLOWERS_S = 300.0
"""The same for the first start: hosts may have to fetch code and packages."""
SAY_S = 10.0
"""Interval of messages while waiting."""


@dataclass(frozen=True, slots=True)
class LocalExit:
    """A rank on this host has ended."""

    start: int
    """Number of its start."""
    end: RankExit


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The node agent asks this process to leave."""


News: TypeAlias = LocalExit | FollowerNews | LeaveRequest
NewsQueue: TypeAlias = "queue.SimpleQueue[News]"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks of one start and their hosts."""

    shape: MeshShape
    address: str
    """Where rank 0 will listen."""
    followers: tuple[Follower, ...] = ()
    plan: PipelinePlan | None = None
    """Of an elastic island; None: its ranks measure and plan."""
    known: tuple[Follower, ...] = ()
    """All hosts that were connected, with or without ranks."""

    @property
    def runs(self) -> list[range]:
        """The ranks of each host, starting with the first."""
        return split_ranks(self.shape.ranks, machines=1 + len(self.followers))


def gather(
    server: RendezvousServer,
    spec: JobSpec,
    history: RestartHistory,
    *,
    first: bool,
    news: NewsQueue,
    should_stop: Callable[[], bool],
    plans: Mapping[int, PipelinePlan] | None = None,
) -> Rendezvous | None:
    """Wait for the hosts of an island; return how it starts, or None when asked to leave.

    With `on_loss = "wait"` it starts only with all hosts. With `shrink`, and if it is elastic, late
    hosts are left out, if the rest can hold one whole model. Events before the start are dropped.
    `plans` are those of an elastic island; none: it starts to measure.
    """
    began = said = time.monotonic()
    patience_s = FIRST_FOLLOWERS_S if first else FOLLOWERS_S
    while not should_stop():
        now = time.monotonic()
        late = now >= began + patience_s
        found = with_those_here(server, spec, history, plans=plans, late=late)
        if found is not None:
            return found
        if now >= said + SAY_S:
            said = now
            log.info("waiting for %s", ", ".join(server.missing()))
        try:
            news.get(timeout=1.0)
        except queue.Empty:
            continue
    return None


def with_those_here(
    server: RendezvousServer,
    spec: JobSpec,
    history: RestartHistory,
    *,
    plans: Mapping[int, PipelinePlan] | None = None,
    late: bool = True,
) -> Rendezvous | None:
    """Return how an island starts with the hosts that are connected; None: it cannot, or waits.

    Unless it is `late`, it waits for hosts that would allow a larger mesh.
    """
    followers = tuple(server.followers().values())
    connected = spec.mesh.ranks // spec.island.machines * (1 + len(followers))
    plan = history.plan(spec, plans or {}, most=connected)
    if plans:
        best = history.plan(spec, plans)
        wanted = best.mesh if best is not None else None
        possible = plan.mesh if plan is not None else None
    else:
        wanted, possible = history.shape(spec), history.shape(spec, most=connected)
    if possible is None or not (late or possible == wanted):
        return None
    chosen = followers[: min(spec.island.machines, possible.ranks) - 1]
    return Rendezvous(possible, server.meeting_address(), chosen, plan, followers)
