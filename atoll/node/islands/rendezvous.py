"""An island over several machines before it starts: who is here, and who gets which ranks."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from atoll.config import JobSpec, MeshShape, dealt
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.rendezvous_server import Follower, HandNews, RendezvousServer
from atoll.node.islands.restart_history import RestartHistory

log = logging.getLogger(__name__)

HANDS_S = 30.0
"""With `on_loss = "shrink"`: how long an island that has worked before waits for lost machines."""
FIRST_HANDS_S = 300.0
"""The same for one that was never started: machines may have to fetch code and packages first."""
SAY_S = 10.0
"""Pause between two lines about what is waited for."""


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """A rank on this machine has ended."""

    start: int
    """Of which start it was."""
    end: RankExit


@dataclass(frozen=True, slots=True)
class RankRequest:
    """This process, or a hand, was asked to leave."""


News: TypeAlias = LocalEndpoint | HandNews | RankRequest
NewsQueue: TypeAlias = "queue.SimpleQueue[News]"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks of one start and the machines they are dealt to."""

    shape: MeshShape
    address: str
    """Where the first rank will listen."""
    hands: tuple[Follower, ...] = ()
    """The further machines."""

    @property
    def runs(self) -> list[range]:
        """The ranks of each machine, the first one's first."""
        return dealt(self.shape.ranks, machines=1 + len(self.hands))


def gather(
    gate: RendezvousServer, spec: JobSpec, losses: RestartHistory, *, first: bool, news: NewsQueue,
    is_asked: Callable[[], bool],
) -> Rendezvous | None:  # fmt: skip
    """Wait for the machines of an island; return how it starts, or None when asked to leave.

    With `on_loss = "wait"` it starts with all of them only. With `shrink` those that are not there
    in time are left out, if the rest can hold one whole model.

    Args:
        gate: Where they come to.
        spec: The job.
        losses: What was lost of late.
        first: The island was never started before.
        news: What happens; what concerns nobody who is here is taken out.
        is_asked: Whether this process was asked to leave.
    """
    began = said = time.monotonic()
    patience_s = FIRST_HANDS_S if first else HANDS_S
    each = spec.mesh.ranks // spec.island.machines
    while not is_asked():
        now = time.monotonic()
        hands = tuple(gate.hands().values())
        wanted, possible = losses.shape(spec), losses.shape(spec, most=each * (1 + len(hands)))
        enough = possible == wanted or (possible is not None and now >= began + patience_s)
        if possible is not None and enough:
            chosen = hands[: min(spec.island.machines, possible.ranks) - 1]
            return Rendezvous(possible, gate.meeting_address(), chosen)
        if now >= said + SAY_S:
            said = now
            log.info("waiting for %s", ", ".join(gate.missing()))
        try:
            news.get(timeout=1.0)
        except queue.Empty:
            continue
    return None
