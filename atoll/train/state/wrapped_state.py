"""Start, save and recover the state of an optimizer wrapped by `run.wrap`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atoll.checkpoint import BackgroundSaver, Extras, adopt, describe, resume
from atoll.config import CheckpointTable
from atoll.errors import LeftBehind
from atoll.group.base import Group
from atoll.strategies.base import Outer, SyncResult, extend_history_hash
from atoll.task import Task
from atoll.train.join_job import JoinedJob
from atoll.train.state.committed import CommittedState, take_exchanged
from atoll.train.state.recovery_client import RolledBack
from atoll.train.state.saving import Saving
from atoll.wire.messages import Event, Lease

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


class RankStates(Protocol):
    """What a script keeps besides model and optimizer, on all its ranks."""

    def gather(self) -> Sequence[Mapping[str, Any]]:
        """Return the state of every rank."""
        ...

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of every rank."""
        ...

    def place(self) -> tuple[int, dict[str, int]] | None:
        """Return the data slot and its cursor; None without shared data."""
        ...

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        """Continue with a data slot from a cursor."""
        ...


class WrappedState:
    """Recovery and checkpoints for a script that trains through `run.wrap`."""

    def __init__(
        self,
        task: Task,
        outer: Outer,
        *,
        group: Group,
        strategy: str,
        enrolled: JoinedJob | None,
        table: CheckpointTable | None = None,
        rank_states: RankStates | None = None,
    ) -> None:
        """Store the arguments; without a `table` no checkpoint is saved."""
        self._rank_states = rank_states
        self._task, self._outer, self._group = task, outer, group
        self._strategy, self._enrolled = strategy, enrolled
        self._table = table if table is not None else CheckpointTable(every_s=0)
        self._saver: BackgroundSaver | None = None

    def begin(self) -> SyncResult | None:
        """Start with the others, from a checkpoint, or in the middle of their run."""
        enrolled = self._enrolled
        if enrolled is None:
            return extend_history_hash(self._task, self._outer.begin(self._task))
        result: SyncResult | None = None
        try:
            if enrolled.late:
                self.recover(None)
            elif enrolled.connection.registered.resume_round >= 0:
                self._resume(enrolled, enrolled.connection.registered.resume_round)
                self._read(getattr(enrolled.connection.registered, "lease", None))
            else:
                result = extend_history_hash(self._task, self._outer.begin(self._task))
        except LeftBehind as error:
            self.recover(error)
        if self._outer.inherits:
            state = CommittedState(self._task, self._outer)
            enrolled.recovery.offer(self._task, state)
        return result

    def recover(self, error: LeftBehind | None) -> None:
        """Take over the committed state of other members, or of the newest checkpoint.

        Raises:
            LeftBehind: there is no hub to recover through (`error` itself).
        """
        enrolled = self._enrolled
        if enrolled is None:
            raise error or LeftBehind(
                "the run is under way", expected="a connection to the other members"
            )
        if not self._outer.inherits:
            enrolled.recovery.catch_up(self._task, self._outer)
            self._outer.rejoin(self._task)
            return
        try:
            lease = enrolled.recovery.take(self._task, self._outer).lease
        except RolledBack as back:
            log.warning("%s", back)
            lease = back.lease
            if back.round >= 0:
                self._resume(enrolled, back.round)
            else:
                self._task.round = self._group.committed_round
                place = self._rank_states.place() if self._rank_states is not None else None
                if lease is None and place is not None:
                    lease = Lease(place[0])  # all work is lost: from the beginning
                self._read(lease)
                extend_history_hash(self._task, self._outer.begin(self._task))
                return
        self._read(lease)

    def _read(self, lease: Lease | None) -> None:
        """Read the leased data from its committed position: later samples are given again."""
        if lease is not None and self._rank_states is not None:
            self._rank_states.move(lease.slot, lease.cursor)

    def after(self, sync: SyncResult | None) -> None:
        """Record a round, and save if it is due."""
        enrolled, every = self._enrolled, self._table.every
        if sync is None or enrolled is None or not (every or self._table.every_s):
            return
        final, round_ = sync.ends(self._group), self._task.round
        due = round_ % every == 0 if every else round_ == enrolled.connection.group.save_round
        if final or due:
            if self._saver is None:  # not before: a short script needs no writer
                self._saver = enrolled.saver()
            self._save(final=final)

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._saver is not None:
            self._saver.close(timeout_s=CLOSE_TIMEOUT_S)

    def _save(self, *, final: bool) -> None:
        extras = Extras(
            strategy=self._strategy, counters={"chain": self._task.past},
            about=describe("script", options={}, tokenizer=""),
            rank_states=self._rank_states.gather() if self._rank_states is not None else (),
        )  # fmt: skip
        Saving(saver=self._saver).save(
            self._task, self._outer, extras, members=self._group.members, final=final
        )

    def _resume(self, enrolled: JoinedJob, round_: int) -> None:
        store = enrolled.store()
        try:
            restored = resume(store, round_, self._task, strategy=self._strategy)
        finally:
            store.close()
        self._task.push()
        take_exchanged(self._task, restored.outer)
        warning = adopt(self._outer, restored, strategy=self._strategy)
        if warning:
            self._tell(enrolled, warning)
        self._outer.rejoin(self._task)
        self._task.past = str(restored.counters.get("chain", ""))
        if self._rank_states is not None:
            self._rank_states.restore(restored.rank_states)

    def _tell(self, enrolled: JoinedJob, text: str) -> None:
        log.warning("%s", text)
        enrolled.connection.link.notify(Event("outer-state-left-out", text))
