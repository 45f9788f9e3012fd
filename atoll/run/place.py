"""Where a script's process is in its job, whatever it does there."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.run.rank_state import RankState
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.sharding import DataShare, deal


class JobPlace:
    """One process among the ranks of a member, and that among the members."""

    def __init__(
        self, ranks: ScriptRanks, *, job: str, directory: Path, seed: int, slot: int, num_slots: int
    ) -> None:
        """Be one of a member's ranks; most are the only one."""
        self.job, self.directory, self.seed = job, directory, seed
        self._slot, self._num_slots = slot, num_slots
        self._ranks = ranks
        self._joint = ranks.place.ranks > 1
        """Whether ranks meet; also where the only one has spread its model over a mesh of one."""
        self._before: Any = None
        self._kept = RankState()
        self.results: dict[str, Any] = {}
        """Further entries of this member's part of the summary."""

    @property
    def slot(self) -> int:
        """Own number among the members, from 0."""
        return self._slot

    @property
    def num_slots(self) -> int:
        """How many members the job was started with."""
        return self._num_slots

    @property
    def rank(self) -> int:
        """Own number in the island; 0 is the rank that speaks for it."""
        return self._ranks.place.rank

    @property
    def ranks(self) -> int:
        """How many processes this member is."""
        return self._ranks.place.ranks

    @property
    def device(self) -> torch.device:
        """What this rank computes on: its accelerator, or the processor.

        Raises:
            ConfigError: the job wants accelerators and there is none for this rank.
        """
        return self._ranks.device

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of the island as a mesh with the axes replicate, shard, pipeline and tensor.

        Every rank MUST ask for it. Unless the script has done so before, this starts
        torch.distributed, with NCCL on accelerators and else Gloo.
        """
        return self._ranks.mesh

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop: leave the loop soon.

        The ranks of an island learn it in the same step.
        """
        return self._ranks.message is not None and self._ranks.message.stopping

    def shard(self, data: Any) -> Any:
        """Return this member's share of some data; all shares together are the whole.

        A `DataLoader` comes back as a loader of the own samples (shuffled if it was), a data set
        with a length as a `Subset`, anything else as an iterable of every n-th item. Loaders
        and iterables end early when the job is asked to stop. Iterables and loaders with a sampler
        of their own MUST give every member the same order.

        In an island every rank calls it. Ranks that differ only along `pipeline` or `tensor` get
        the same rows, the others different ones, all equally many.
        """
        if self._joint:
            self._ranks.meet()
        dealt = deal(
            data, slot=self.slot, num_slots=self.num_slots, seed=self.seed,
            should_stop=lambda: self.stopping, rank=self._ranks.data_rank,
            ranks=self._ranks.shape.data,
        )  # fmt: skip
        if isinstance(dealt, DataShare):
            self._kept.share(dealt)
        return dealt

    def keep(self, name: str, thing: Any) -> None:
        """Keep a thing's state in the job's checkpoints, and give it back when the job goes on.

        For what else the script has: a schedule, a gradient scaler, averages, its own counters. Of
        an island every rank calls it, and has its own back; so it is with random numbers and the
        place in what `shard` returned, which are kept without being asked for.

        Args:
            name: Its own, the same from run to run.
            thing: With `state_dict()`, of tensors, numbers, texts and containers of these, and
                `load_state_dict(state)`, which is called at once where the job goes on already.

        Raises:
            ConfigError: it has no such methods, or the name is taken.
            CheckpointError: what the checkpoint has under this name does not fit it.
        """
        self._kept.thing(name, thing)

    # -------------------------------------------------------------------------------- signals

    def __enter__(self) -> Self:
        """Take over SIGTERM: it makes `stopping` true and ends nothing by itself."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._leave_soon()

    def _leave_soon(self) -> None:
        """Take note that this process was asked to leave."""
        raise NotImplementedError  # a member and a follower each have their own way

    def _give_signals_back(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
