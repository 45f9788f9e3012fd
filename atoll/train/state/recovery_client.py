"""Recover the committed state from other members, and offer the own state to them.

A member that joins late, or that the group left behind, asks the hub which members are donors,
fetches their state, and loads it. The hub may commit more rounds meanwhile, so the member asks
again after fetching and repeats until its state is the newest.
"""

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
"""How many fetched states may fail to load before the member gives up."""

# Short enough that a stop request is noticed at once while a fetch runs.
POLL_S = 0.2


class RolledBack(GroupError):
    """No member has the committed state any more: the run continues from a checkpoint."""

    def __init__(self, round_: int, *, lease: Lease | None = None) -> None:
        """Continue from the checkpoint of `round_` (-1: the beginning), on the data of `lease`."""
        super().__init__(
            "no member has the committed state any more",
            expected=f"the checkpoint of round {round_}" if round_ >= 0 else "a fresh start",
        )
        self.round, self.lease = round_, lease


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """A committed state that was loaded."""

    lease: Lease | None
    """The data to train on until the next round."""
    sources: tuple[str, ...]
    seconds: float
    nbytes: int


class Hub(Protocol):
    """The hub's part in a recovery; implemented by :class:`atoll.group.hub.HubGroup`."""

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return which members have the committed state."""
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
        """Report that this member has the committed state of `round_`."""
        ...


class Fetch(Protocol):
    """Fetches the committed state; may take long."""

    def __call__(
        self, *, ready: bool, distrusted: Sequence[str] = (), older: Recovered | None = None
    ) -> Recovered:
        """Return the state.

        If `ready`, it is loaded at once, so rounds may wait for this member. Parts of an `older`
        one, fetched just before, are used again where they still hold.
        """
        ...


class Server(Protocol):
    """Serves the state; implemented by :class:`atoll.recovery.StateServer`."""

    def offer(
        self,
        state: CommittedState,
        *,
        still: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Serve `state` to members that ask; `still` holds training between two steps."""
        ...


class RecoveryClient:
    """Recovers and offers a task's state; used from the training thread."""

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

        Without `server` the own state is served to no one; a true `should_stop` ends waiting.
        """
        self._hub, self._fetch, self._server = hub, fetch, server
        self._announce, self._should_stop = announce, should_stop
        self._begun: Work[Recovered] | None = None
        self._distrusted: set[str] = set()

    def begin(self) -> None:
        """Start to fetch while model and data are being built; rounds do not wait for this."""
        self._begun = self._start(ready=False)

    def _start(self, *, ready: bool, older: Recovered | None = None) -> Work[Recovered]:
        distrusted = list(self._distrusted)
        return Work.start(
            lambda: self._fetch(ready=ready, distrusted=distrusted, older=older), name="recover"
        )

    def offer(self, task: Task, state: CommittedState) -> None:
        """Serve this member's committed state to late members from now on."""
        if self._server is not None:
            self._server.offer(state, still=task.state_lock.still)

    def take(self, task: Task, outer: Outer) -> RecoveredState:
        """Load the committed state of other members into a task.

        Raises:
            RolledBack: no member has it.
            CheckpointError: `ATTEMPTS` states did not fit this member's model.
            GroupLeft: this member was asked to leave meanwhile.
        """
        began = RealClock().monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            recovered, answer = self._newest()
            if recovered.shared is None:
                raise RolledBack(answer.checkpoint_round, lease=answer.lease)
            task.pace = 1.0 if task.whole_periods else answer.pace
            try:
                adopt(task, outer, shared=recovered.shared, inner=recovered.inner)
            except CheckpointError as error:
                log.warning("the state of %s is not usable: %s", recovered.sources, error)
                self._announce(Event("recovery-refused", f"{task.member}: {error}"))
                if attempt == ATTEMPTS:
                    raise
                # The next fetch avoids these donors.
                self._distrusted.update(recovered.sources)
                continue
            break
        seconds, sources = RealClock().monotonic() - began, tuple(recovered.sources)
        self._hub.standing(
            task.round, base=task.labelled(outer.committed(task).base), sources=list(sources),
            seconds=seconds, nbytes=recovered.nbytes,
        )  # fmt: skip
        return RecoveredState(answer.lease, sources, seconds, recovered.nbytes)

    def catch_up(self, task: Task, outer: Outer) -> None:
        """Take over only round number and data, where members train models of their own.

        A member that keeps its data slot keeps its place: its model has learned what it read.
        """
        answer = self._hub.recover()
        self._hub.standing(answer.round, base=outer.committed(task).base)
        task.round = answer.round
        if answer.lease is None or task.stretch is None:
            return
        slot, cursor = task.stretch.place() or (answer.lease.slot, {})
        read = cursor.get("data_pass", 0) or cursor.get("offset", 0)
        if not read or slot != answer.lease.slot:
            task.stretch.move(answer.lease.slot, answer.lease.cursor)

    def _newest(self) -> tuple[Recovered, Sources]:
        """Return the state of the newest committed round, and the hub's answer for it."""
        work, self._begun = self._begun or self._start(ready=True), None
        while True:
            recovered = self._wait(work)
            # Ask after fetching: the hub may have committed a round meanwhile, and the pace
            # changes.
            answer = self._hub.recover()
            if recovered.shared is None or answer.round == recovered.round:
                return recovered, answer
            log.info("round %d was committed meanwhile; fetching again", answer.round - 1)
            work = self._start(ready=True, older=recovered)

    def _wait(self, work: Work[Recovered]) -> Recovered:
        while not self._should_stop():
            try:
                return work.wait(POLL_S)
            except DeadlineExceeded:
                if work.done():  # it failed like that itself, or has ended since
                    return work.wait(POLL_S)
        raise GroupLeft("this member was asked to leave while it recovered")
