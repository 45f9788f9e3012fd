"""A member's way back among the others: it takes their state over, and offers its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.clock import RealClock
from atoll.errors import CheckpointError, DeadlineExceeded, GroupError, GroupLeft
from atoll.group.base import Work
from atoll.strategies.base import Outer
from atoll.task import Task
from atoll.train.state.committed import CommittedState, adopt
from atoll.wire.messages import Event, Lease, Sources

if TYPE_CHECKING:
    from atoll.recovery import Recovered

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""How often a state that does not fit is fetched anew."""

POLL_S = 0.2


class RolledBack(GroupError):
    """Nobody has the committed state any more: the run goes on from a checkpoint."""

    def __init__(self, round_: int, *, lease: Lease | None = None) -> None:
        """Go on from the checkpoint of a round, -1: from the beginning; `lease`: with what data."""
        super().__init__(
            "nobody has the committed state any more",
            expected=f"the checkpoint of round {round_}" if round_ >= 0 else "a fresh start",
        )
        self.round, self.lease = round_, lease


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """A committed state that was taken over."""

    lease: Lease | None
    """What to train on until the next verdict."""
    sources: tuple[str, ...]
    seconds: float
    nbytes: int


class Hub(Protocol):
    """What the hub is asked; :class:`atoll.group.hub.HubGroup` fits."""

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return who has the committed state."""
        ...

    def standing(
        self,
        round_: int,
        *,
        base: str,
        sources: Sequence[str] = (),
        seconds: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """Tell that this member stands on the committed state now."""
        ...


class Fetch(Protocol):
    """Fetches the committed state; may take long."""

    def __call__(self, *, ready: bool, distrusted: Sequence[str] = ()) -> Recovered:
        """Return it.

        Args:
            ready: It is loaded at once, so that rounds may wait for it.
            distrusted: Members whose state did not fit before.
        """
        ...


class Server(Protocol):
    """What offers the state; :class:`atoll.recovery.StateServer` fits."""

    def offer(
        self,
        state: CommittedState,
        *,
        still: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Give this state to whoever asks for it."""
        ...


class RecoveryClient:
    """See the module's docstring. Used from the training thread."""

    def __init__(
        self,
        hub: Hub,
        *,
        fetch: Fetch,
        server: Server | None,
        announce: Callable[[Event], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch nothing yet.

        Args:
            hub: Who is asked who has the state.
            fetch: Fetches it from them.
            server: Offers the own state; None: nobody can have it.
            announce: Takes events for people.
            should_stop: Asked while waiting; True: give up.
        """
        self._hub, self._fetch, self._server = hub, fetch, server
        self._announce, self._should_stop = announce, should_stop
        self._begun: Work[Recovered] | None = None
        self._distrusted: set[str] = set()

    def begin(self) -> None:
        """Start to fetch, while model and data are still being built."""
        self._begun = self._start(ready=False)

    def _start(self, *, ready: bool) -> Work[Recovered]:
        distrusted = list(self._distrusted)
        return Work.start(lambda: self._fetch(ready=ready, distrusted=distrusted), name="recover")

    def offer(self, task: Task, state: CommittedState) -> None:
        """Offer this member's committed state to whoever comes late, from now on."""
        if self._server is not None:
            self._server.offer(state, still=task.gate.still)

    def take(self, task: Task, outer: Outer) -> RecoveredState:
        """Set a task to the committed state of the others.

        Raises:
            SetBack: nobody has it.
            CheckpointError: what they have does not fit this member's model, again and again.
            GroupLeft: this member was asked to leave meanwhile.
        """
        began = RealClock().monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            recovered, answer = self._newest()
            if recovered.shared is None:
                raise RolledBack(answer.checkpoint_round, lease=answer.lease)
            task.pace = answer.pace
            try:
                adopt(task, outer, shared=recovered.shared, inner=recovered.inner)
            except CheckpointError as error:
                log.warning("the state of %s is not usable: %s", recovered.sources, error)
                self._announce(Event("recovery-refused", f"{task.member}: {error}"))
                if attempt == ATTEMPTS:
                    raise
                self._distrusted.update(recovered.sources)
                continue
            break
        seconds, sources = RealClock().monotonic() - began, tuple(recovered.sources)
        self._hub.standing(
            task.round, base=outer.committed(task).base, sources=list(sources),
            seconds=seconds, nbytes=recovered.nbytes,
        )  # fmt: skip
        return RecoveredState(answer.lease, sources, seconds, recovered.nbytes)

    def catch_up(self) -> int:
        """Take over nothing but the number of rounds: members train models of their own."""
        answer = self._hub.recover()
        self._hub.standing(answer.round, base="", sources=[], seconds=0.0, nbytes=0)
        return answer.round

    def _newest(self) -> tuple[Recovered, Sources]:
        """Return the state of the round that is committed now."""
        work, self._begun = self._begun or self._start(ready=True), None
        while True:
            recovered = self._wait(work)
            # The hub may have decided another round since; and the pace depends on the moment.
            answer = self._hub.recover()
            if recovered.shared is None or answer.round == recovered.round:
                return recovered, answer
            log.info("round %d was committed meanwhile; fetching again", answer.round - 1)
            work = self._start(ready=True)

    def _wait(self, work: Work[Recovered]) -> Recovered:
        while not self._should_stop():
            try:
                return work.wait(POLL_S)
            except DeadlineExceeded:
                if work.done():
                    raise
        raise GroupLeft("this member was asked to leave while it recovered")
