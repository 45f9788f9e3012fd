"""Wait for the machines of an island, and decide which ranks each of them gets."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from atoll.config import JobSpec, MeshShape, dealt
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.rendezvous_server import Follower, FollowerNews, RendezvousServer
from atoll.node.islands.restart_history import RestartHistory

log = logging.getLogger(__name__)

FOLLOWERS_S = 30.0
"""With `on_loss = "shrink"`: how long an island that has worked before waits for lost machines."""
FIRST_FOLLOWERS_S = 300.0
"""The same for one that was never started: machines may have to fetch code and packages first."""
SAY_S = 10.0
"""Pause between two lines about what is waited for."""


@dataclass(frozen=True, slots=True)
class LocalExit:
    """A rank on this machine has ended."""

    start: int
    """Of which start it was."""
    end: RankExit


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The node agent asks this process to leave."""


News: TypeAlias = LocalExit | FollowerNews | LeaveRequest
NewsQueue: TypeAlias = "queue.SimpleQueue[News]"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks of one start and the machines they are dealt to."""

    shape: MeshShape
    address: str
    """Where the first rank will listen."""
    followers: tuple[Follower, ...] = ()
    """The further machines."""

    @property
    def runs(self) -> list[range]:
        """The ranks of each machine, the first one's first."""
        return dealt(self.shape.ranks, machines=1 + len(self.followers))


def gather(
    server: RendezvousServer,
    spec: JobSpec,
    history: RestartHistory,
    *,
    first: bool,
    news: NewsQueue,
    is_asked: Callable[[], bool],
) -> Rendezvous | None:
    """Wait for the machines of an island; return how it starts, or None when asked to leave.

    With `on_loss = "wait"` it starts with all of them only. With `shrink` those that are not there
    in time are left out, if the rest can hold one whole model.

    Args:
        server: Where they connect.
        spec: The job.
        history: Ranks that were lost before.
        first: The island starts for the first time.
        news: Events; those before the start are dropped.
        is_asked: Whether this process was asked to leave.
    """
    began = said = time.monotonic()
    patience_s = FIRST_FOLLOWERS_S if first else FOLLOWERS_S
    each = spec.mesh.ranks // spec.island.machines
    while not is_asked():
        now = time.monotonic()
        followers = tuple(server.followers().values())
        wanted, possible = (
            history.shape(spec),
            history.shape(spec, most=each * (1 + len(followers))),
        )
        enough = possible == wanted or (possible is not None and now >= began + patience_s)
        if possible is not None and enough:
            chosen = followers[: min(spec.island.machines, possible.ranks) - 1]
            return Rendezvous(possible, server.meeting_address(), chosen)
        if now >= said + SAY_S:
            said = now
            log.info("waiting for %s", ", ".join(server.missing()))
        try:
            news.get(timeout=1.0)
        except queue.Empty:
            continue
    return None
