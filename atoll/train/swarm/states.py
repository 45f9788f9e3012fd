"""Where a member's stage gets its state from: members of the stage, or a checkpoint at the hub."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from atoll.checkpoint import BackgroundSaver, HubStore, Part, Saved, SavePoint
from atoll.checkpoint.stages import parts_with
from atoll.clock import RealClock
from atoll.errors import CheckpointError, PeerLost
from atoll.recovery import Recipient, StateOf, StateServer, recover
from atoll.recovery.snapshot_cache import Still
from atoll.train.join_job import JoinedJob
from atoll.wire.manifest import PART_SUFFIX, SHARED_PART
from atoll.wire.messages import Recover, Source, Sources
from atoll.wire.swarm import SwarmPlace

FETCH_S = 1800.0
"""Time limit of one transfer; the ledger sends the place again if the donors have stepped on."""


class StageStates(Protocol):
    """Brings the states of stages, and gives the own one to others."""

    def donated(self, place: SwarmPlace) -> Part:
        """Return the state of a stage at the place's step, from its other members.

        Raises:
            GroupError: no donor has that step any more; ask for a place again.
        """
        ...

    def saved(self, round_: int, model_tensors: Collection[str], *, stage: int) -> Iterator[Part]:
        """Yield the files of a checkpoint that hold some of these tensors, of a stage.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
            HubUnreachable: the hub does not answer.
        """
        ...

    def offer(self, state: StateOf, still: Still) -> None:
        """Give this state to members that ask for it, from now on."""
        ...

    def save(self, part: Part, *, step: int, final: bool, failed: Callable[[], None]) -> None:
        """Save a stage's file of a checkpoint, see `Stages.save`."""
        ...


@dataclass(frozen=True, slots=True)
class HubStates:
    """What the states of parts of a model need of a job at a hub."""

    recipient: Recipient
    server: StateServer
    store: Callable[[], HubStore]
    saver: BackgroundSaver
    relayed: bool = False
    """Everything goes through the hub: it dials no other member."""

    @classmethod
    def of(cls, joined: JoinedJob, *, should_stop: Callable[[], bool]) -> Self:
        """Return the states of a member's job."""
        environment, link = joined.environment, joined.connection.link
        recipient = Recipient(
            link, environment.job, environment.member, link.notify, stop=should_stop
        )
        return cls(
            recipient, joined.server, joined.store, joined.saver(), relayed=environment.relayed
        )

    def fetch(
        self,
        round_: int,
        donors: Sequence[str],
        serves: Mapping[str, Sequence[str]],
        *,
        gone: PeerLost,
    ) -> Part:
        """Fetch a state from donors, directly where they can be dialled, else relayed.

        Raises:
            PeerLost: `gone`, if none of them has it any more.
        """
        peers = [Source(d, [] if self.relayed else list(serves.get(d, []))) for d in donors]
        called = False

        def ask(question: Recover) -> Sources:
            nonlocal called
            if called:
                raise gone
            called = True
            return Sources(round_, peers)

        found = recover(self.recipient, ask=ask, deadline=RealClock().monotonic() + FETCH_S)
        if found.shared is None:
            raise gone
        return found.shared

    def offer(self, state: StateOf, still: Still) -> None:
        """Serve the state over the member's server."""
        self.server.offer(state, still=still)

    def close(self) -> None:
        """End the background saver; what it has not written is lost."""
        self.saver.abandon()


@dataclass(frozen=True, slots=True)
class JobStates(HubStates):
    """The states of the stages of a job at a hub."""

    def donated(self, place: SwarmPlace) -> Part:
        """Fetch from all donors at once."""
        donors = ", ".join(place.donors) or "no donors"
        gone = PeerLost(
            "no member of this stage has the state of this step",
            given=f"stage {place.stage}, step {place.step}, {donors}",
        )
        return self.fetch(place.step, place.donors, place.serves, gone=gone)

    def saved(self, round_: int, model_tensors: Collection[str], *, stage: int) -> Iterator[Part]:
        """Download one file after the other: only one is in memory besides what is kept of it."""
        with contextlib.closing(self.store()) as store:
            names = [part.name for part in store.manifest(round_).parts]
            if SHARED_PART in names:
                raise CheckpointError(
                    "this checkpoint is not one of a model in stages",
                    given=f"{SHARED_PART} in the checkpoint of round {round_}",
                    remedy="resume it with the strategy that saved it",
                )
            files = [name for name in names if name.endswith(PART_SUFFIX)]

            def read(name: str) -> Part:
                return store.get(round_, names=[name])[name]

            yield from parts_with(model_tensors, files, read, stage=stage)

    def save(self, part: Part, *, step: int, final: bool, failed: Callable[[], None]) -> None:
        """Copy the part, and upload it in the background."""
        me = self.recipient.me
        found = self.saver.save(SavePoint(step, step, me, [me]), [part], final=final)
        if not isinstance(found, Saved):
            failed()
        elif final:
            threading.Thread(target=self._wait, args=(failed,), name="last-save").start()

    def _wait(self, failed: Callable[[], None]) -> None:
        if not self.saver.wait(FETCH_S):
            failed()
