"""Rank, device, mesh and data share of a script's process in its job."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import LogTable
from atoll.run.rank_state import RankState
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.sharding import deal
from atoll.train.shares.share import DataSetShare, LoopView
from atoll.train.shares.sources import Division


@dataclass(frozen=True, slots=True)
class Membership:
    """The job of a process, and its member's share of it; by default a job of one member."""

    directory: Path
    """The process's own folder."""
    seed: int = 7
    job: str = "alone"
    slot: int = 0
    num_slots: int = 1
    log: LogTable = field(default_factory=LogTable)
    """Where its measurements go besides the hub."""


class JobPlace:
    """One process: its rank in the member, and the member's slot in the job."""

    def __init__(self, ranks: ScriptRanks, membership: Membership) -> None:
        """Describe one of a member's ranks; usually it is the only one."""
        self._membership = membership
        self.job, self.directory = membership.job, membership.directory
        self.seed = membership.seed
        self._ranks = ranks
        self._joint = ranks.place.ranks > 1
        """Whether ranks synchronize; also of a single rank that has sharded its model."""
        self._before: Any = None
        self._rank_state = RankState()
        self.results: dict[str, Any] = {}
        """Further entries of this member's part of the summary."""

    @property
    def slot(self) -> int:
        """The member's number, from 0."""
        return self._membership.slot

    @property
    def num_slots(self) -> int:
        """Number of members the job was started with."""
        return self._membership.num_slots

    @property
    def rank(self) -> int:
        """Rank in the island; 0 communicates for it."""
        return self._ranks.place.rank

    @property
    def ranks(self) -> int:
        """Number of processes of this member."""
        return self._ranks.place.ranks

    @property
    def device(self) -> torch.device:
        """Device of this rank: its accelerator, or the CPU.

        Raises:
            ConfigError: the job wants accelerators and there is none for this rank.
        """
        return self._ranks.device

    @property
    def mesh(self) -> DeviceMesh:
        """The island's ranks as a mesh with the axes replicate, shard, pipeline and tensor.

        Every rank MUST access it. Unless the script has done so, this initializes
        torch.distributed, with NCCL on accelerators and Gloo otherwise.
        """
        return self._ranks.mesh

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop: leave the loop soon.

        The ranks of an island see it in the same step.
        """
        return self._ranks.message is not None and self._ranks.message.stopping

    def shard(self, data: Any) -> Any:
        """Return this member's share of some data; all members' shares together are the whole.

        A `DataLoader` becomes a loader of this member's samples (shuffled if it was; any other
        sampler must draw the same order on every member, of which each takes its part), a data set
        with a length a `Subset`, anything else an `IterableDataset` of every n-th item, which may
        be given to a `DataLoader` with workers. All of them end early when the job is asked to
        stop. Iterables MUST give every member the same order.

        What is iterated directly has a position, which every round commits: a new process of a
        member continues there, and the others read on for a member that is not replaced. Passes
        that were done before are empty then, so a loop over epochs goes on in the right one.

        In an island every rank calls it. Ranks that differ only along `pipeline` or `tensor` get
        the same rows, the others different ones, all equally many.

        Raises:
            DataError: there are fewer samples than members, or a sampler's order cannot be
                repeated.
        """
        if self._joint:
            self._ranks.meet()
        division = Division(
            self.slot, self.num_slots, self.seed, rank=self._ranks.data_rank,
            ranks=self._ranks.shape.data,
        )  # fmt: skip
        loop = LoopView(
            should_stop=lambda: self.stopping, step=lambda: self.step,
            unsettled=lambda: self._is_unsettled, hold_round=self.finish,
        )  # fmt: skip
        dealt = deal(data, division, loop)
        self._rank_state.share(dealt.share if isinstance(dealt, DataSetShare) else dealt)
        return dealt

    @property
    def step(self) -> int:
        """Optimizer steps done by the group; a joining member starts there."""
        return 0

    @property
    def _is_unsettled(self) -> bool:
        """Whether members have come, gone or been left behind; the same on all ranks."""
        return self._ranks.message is not None and self._ranks.message.unsettled

    def finish(self) -> None:
        """Synchronize the last steps."""

    def keep(self, name: str, thing: Any) -> None:
        """Store an object's state in the job's checkpoints, and restore it when the job resumes.

        For further state of the script: a scheduler, a gradient scaler, averages, counters. In an
        island every rank calls it and gets its own state back. Random number generators and the
        position in data from `shard` are stored automatically.

        Args:
            name: Unique name, the same from run to run.
            thing: With `state_dict()`, of tensors, numbers, texts and containers of these, and
                `load_state_dict(state)`, which is called at once if the job was resumed.

        Raises:
            ConfigError: it has no such methods, or the name is taken.
            CheckpointError: the checkpoint's state of this name does not fit.
        """
        self._rank_state.thing(name, thing)

    # -------------------------------------------------------------------------------- signals

    def __enter__(self) -> Self:
        """Install a SIGTERM handler that sets `stopping` instead of ending the process."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._leave_soon()

    def _leave_soon(self) -> None:
        """Record that this process was asked to leave."""
        raise NotImplementedError  # Session and FollowerRun leave in different ways

    def _give_signals_back(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
