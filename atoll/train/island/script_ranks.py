"""The ranks of an island in a script: where they meet, and what they exchange there.

A script runs on every rank at once, and all come to the same calls in the same order. At such a
place every rank first sends a few numbers, so that one which came to another place is noticed
rather than waited for; then the first rank does what only a member of the job can do while the
others serve it, until it lets them go on with a message: what ranks may know of the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import MeshShape, RankPlace
from atoll.devices.runtime import backend
from atoll.errors import ConfigError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.start_phase import StartPhase, StartReport
from atoll.island.world import build_mesh, device_of, world

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

GO_ON = "go on"
PLACES = ("start", "wrap", "step", "finish", "save", "evaluating", "track", "end")
"""Calls of a script at which ranks meet; ranks send the number of theirs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMessage:
    """What the first rank sends when the others may continue."""

    member: str = "w0"
    members: list[str] = dataclasses.field(default_factory=list)
    slot: int = 0
    num_slots: int = 1
    step: int = 0
    round: int = 0
    stopping: bool = False
    unsettled: bool = False
    """Members have come, gone or been left behind since this process began."""
    takes_over: bool = False
    """The member continues a run: it joined late, or the job was resumed."""
    midway: bool = False
    """The place is not over: do the own optimizer's step, then return here."""
    skipped: bool = False
    """Leave out that step."""


@dataclasses.dataclass(slots=True)
class RankReport:
    """What a rank sends when it comes to a place."""

    overflowed: bool = False
    """Its gradients overflowed in half precision."""
    leave_requested: bool = False
    """Its process was asked to leave."""
    losses: float = 0.0
    """Sum of the losses logged since the last place."""
    count: int = 0
    """Number of these losses."""
    tokens: int = 0
    """Tokens logged since."""

    def add(self, *, loss: float | Tensor | None, tokens: int) -> None:
        """Add what a script logs."""
        if loss is not None:
            self.losses += float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            self.count += 1
        self.tokens += tokens

    def row(self, place: str) -> Tensor:
        """Return the report as numbers."""
        flags = [self.overflowed, self.leave_requested]
        values = [PLACES.index(place), *flags, self.losses, self.count]
        return torch.tensor([float(v) for v in [*values, self.tokens]], dtype=torch.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What all ranks sent, put together."""

    overflowed: bool
    leave_requested: bool
    loss: float | None
    """Mean over the ranks that logged one."""
    tokens: int
    """Sum over all rows of data, each counted once."""


class _Continue(Exception):
    """Raised to leave the serving loop when the first rank lets this one continue."""

    def __init__(self, message: RankMessage) -> None:
        self.message = message


class ScriptRanks:
    """One rank's view of its island; use it from the training thread only."""

    def __init__(
        self,
        place: RankPlace,
        *,
        shape: MeshShape,
        device: str = "auto",
        timeout_s: float = 300.0,
        start: StartReport | None = None,
    ) -> None:
        """Connect to no rank yet, so that the script may make its own process group.

        Args:
            place: This rank.
            shape: The mesh: which ranks see the same rows of data.
            device: The setting, see `[job] device`.
            timeout_s: How long one collective may take.
            start: Where this rank reports how far it has come at its start.

        Raises:
            ConfigError: the mesh has another number of ranks.
        """
        if shape.ranks != place.ranks:
            raise ConfigError(
                "the mesh does not divide the ranks", given=f"mesh {shape}",
                expected=f"{place.ranks} ranks",
            )  # fmt: skip
        self.place, self.shape = place, shape
        self._wanted, self._timeout_s = device, timeout_s
        self._start = start or StartReport()
        self._stack = ExitStack()
        self._broadcaster: CommandBroadcaster | None = None
        self._mesh: DeviceMesh | None = None
        self.message: RankMessage | None = None
        """The newest message of rank 0; None before the ranks have met."""
        self.make_message: Callable[[], RankMessage] = RankMessage
        """On rank 0: makes the message to the others."""
        self.report = RankReport()
        """What this rank sends at the next place."""

    @classmethod
    def alone(cls) -> ScriptRanks:
        """Return the only rank of its island."""
        return cls(RankPlace(rank=0, ranks=1, local_rank=0, address="", port=0), shape=MeshShape())

    @property
    def met(self) -> bool:
        """Whether the ranks have met."""
        return self._broadcaster is not None

    @property
    def leads(self) -> bool:
        """Whether this rank is the member of the job."""
        return self.place.leads

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return device_of(self.place, wanted=self._wanted)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the island's rows."""
        return self._share_of(self.place.rank)

    def _share_of(self, rank: int) -> int:
        at = self.shape.place(rank)
        return at["replicate"] * self.shape.shard + at["shard"]

    # ------------------------------------------------------------------------- meeting

    @property
    def broadcaster(self) -> CommandBroadcaster:
        """How the first rank leads; the ranks MUST have met."""
        if self._broadcaster is None:
            raise ConfigError(
                "the ranks of this island have not met yet",
                remedy="call run.mesh, run.shard or run.wrap on every rank before",
            )
        return self._broadcaster

    def meet(self) -> None:
        """Come together, if that has not happened: every rank calls it."""
        if self._broadcaster is not None:
            return
        self._start.enter(StartPhase.MEETING)
        if not dist.is_initialized():
            self._stack.enter_context(self._world())
        if dist.get_world_size() != self.place.ranks:
            raise ConfigError(
                "the process group of the script is not that of its island",
                given=f"{dist.get_world_size()} ranks", expected=f"{self.place.ranks}",
            )  # fmt: skip
        self._broadcaster = CommandBroadcaster(rank=self.place.rank, ranks=self.place.ranks)
        self._broadcaster.on(GO_ON, self._go_on)
        self.arrive("start")
        self.go_on()
        self._start.enter(StartPhase.READY)

    def _world(self) -> AbstractContextManager[None]:
        if self.place.ranks == 1:
            return _by_itself(self.device)
        return world(self.place, device=self.device, timeout_s=self._timeout_s)

    @property
    def mesh(self) -> DeviceMesh:
        """All four axes; collective."""
        self.meet()
        if self._mesh is None:
            self._mesh = build_mesh(self.shape, device=self.device)
        return self._mesh

    def arrive(self, place: str) -> Reply:
        """Exchange reports with all ranks at a place; every rank calls it.

        Raises:
            ConfigError: a rank has arrived at another place.
        """
        self.meet()
        report, self.report = self.report, RankReport(leave_requested=self.report.leave_requested)
        rows = self.broadcaster.gather(report.row(place)).tolist()
        places = [PLACES[int(row[0])] for row in rows]
        if len(set(places)) > 1:
            raise ConfigError(
                "the ranks of this island are at different places of the script",
                given=", ".join(f"rank {rank}: {at}" for rank, at in enumerate(places)),
                expected="the same calls in the same order on every rank",
                remedy="give every rank as many batches: run.shard does",
            )
        counted = sum(row[4] for row in rows)
        tokens: dict[int, float] = {}  # ranks that read the same rows may each count them
        for rank, row in enumerate(rows):
            share = self._share_of(rank)
            tokens[share] = max(tokens.get(share, 0.0), row[5])
        return Reply(
            overflowed=any(row[1] for row in rows),
            leave_requested=any(row[2] for row in rows),
            loss=sum(row[3] for row in rows) / counted if counted else None,
            tokens=round(sum(tokens.values())),
        )

    def go_on(self, *, midway: bool = False, skipped: bool = False) -> RankMessage:
        """On the first rank, let the others continue; on these, serve it until then.

        For `midway` and `skipped` see :class:`RankMessage`.
        """
        if self.leads:
            self.message = dataclasses.replace(self.make_message(), midway=midway, skipped=skipped)
            self.broadcaster.call(GO_ON, **dataclasses.asdict(self.message))
            return self.message
        try:
            self.broadcaster.serve()
        except _Continue as ending:
            self.message = ending.message
            return self.message
        raise ConfigError(
            "the first rank has left the script before this one",
            expected="the same calls in the same order on every rank",
        )

    def _go_on(self, **word: Any) -> None:
        if not self.leads:
            raise _Continue(RankMessage(**word))

    def part(self) -> None:
        """End the island after success; collective, after all have arrived at `end`."""
        if self.leads:
            self.broadcaster.end()
        else:
            self.broadcaster.serve()
        self.broadcaster.part()
        self._stack.close()


@contextmanager
def _by_itself(device: torch.device) -> Iterator[None]:
    """Have a process group of one rank, on this device, inside the block."""
    dist.init_process_group(
        backend(device),
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
