"""The built-in trainer on an island: every rank computes a part, the first one leads.

The first rank also keeps a host model: all parameters whole, in main memory. Strategies and
checkpoints work on it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from atoll.config import JobSpec
from atoll.config.rank_environment import RankPlace
from atoll.errors import ConfigError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.morph_orders import MorphOrder, Moved, Orders
from atoll.island.start_phase import StartPhase, StartReport
from atoll.island.world import build_mesh, device_of, world
from atoll.strategies.base import Inner, Outer
from atoll.strategies.inner.gather_scatter import limit_heap, trim_heap
from atoll.strategies.inner.host_model import HostModel, HostModelOnDisk, in_one_piece
from atoll.strategies.inner.leader import IslandLeader
from atoll.strategies.inner.meta_init import meta_copy, on_meta
from atoll.strategies.inner.remote_optimizer import RemoteOptimizer, RemoteScaler
from atoll.strategies.inner.worker import BUILD, LOSS, SEED, Worker
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.strategies.vectors.flat import iter_tensors
from atoll.train.build import Built, whole_model
from atoll.train.computing import options_on
from atoll.train.optim.optimizers import build_optimizer

RAM, DISK = "ram", "disk"
"""Values of `memory` in `[island]`."""

BETWEEN_S = 10.0
"""Shortest time between two returns of freed memory to the system."""

STEPS_APART = 7_919
"""Distance between the seeds of starts at neighbouring steps."""


class TrainerIsland:
    """One rank of an island that runs the built-in trainer; the same on every rank."""

    def __init__(
        self,
        spec: JobSpec,
        broadcaster: CommandBroadcaster,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        orders: Orders | None = None,
    ) -> None:
        """Be one rank; nothing is built before the first command.

        `orders` say where the ranks go on; None: they stay.
        """
        self._orders = orders
        self.broadcaster, self._spec, self._mesh = broadcaster, spec, mesh
        self._whole: Any = None
        """On the first rank: the host model."""
        self._disk: HostModelOnDisk | None = None
        self._gave_back = 0.0
        self._worker = Worker(
            broadcaster,
            mesh=mesh,
            device=device,
            options=options_on(spec, device, island=True),
            make=self._make,
        )

    def _make(self) -> tuple[Any, Optimizer]:
        """Return the whole model to divide, and its optimizer."""
        model = self._model()
        return model, build_optimizer(model, self._spec.train)

    def _model(self) -> Any:
        """Return the whole model to divide; it gets the host model's values afterwards.

        A pipeline also measures it before the division, on the first rank.
        """
        if self._whole is not None:
            several = self._mesh["pipeline"].size() > 1
            return copy.deepcopy(self._whole) if several else meta_copy(self._whole)
        if self._spec.job.threads:
            torch.set_num_threads(self._spec.job.threads)
        return on_meta(lambda: whole_model(self._spec))

    # -------------------------------------------------------------------- on the first rank

    @property
    def order(self) -> MorphOrder | None:
        """Where this rank should go on after a round; None: here."""
        return self._orders.newest if self._orders is not None else None

    def settle(self, built: Built, *, folder: Path) -> None:
        """Let all ranks build their parts; what was built here becomes the host model.

        `folder` holds files needed while this process runs.

        Raises:
            ConfigError: the model or its optimizer cannot be divided like that, or the strategy
                cannot work on disk.
        """
        task, model = built.task, built.model
        self._disk = self._disk_in(folder, built)
        self._whole = model
        named = dict(model.named_parameters())
        # All names: what has two on one rank may be known by the other one on another rank.
        self._worker.host_tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        new = self._disk.new if self._disk is not None else torch.empty
        vector = in_one_piece([*task.parameters(), *task.buffers()], new=new)
        self.broadcaster.call(BUILD, self._sample(built))
        self._host_model = HostModel(
            self.broadcaster, vector=vector, constrained=self._worker.constrained
        )
        task.elsewhere = self._host_model
        task.optimizer = RemoteOptimizer(
            task.optimizer, names=named, broadcaster=self.broadcaster, worker=self._worker
        )

    def _disk_in(self, folder: Path, built: Built) -> HostModelOnDisk | None:
        """Return where the host model and the strategy's vectors go; None: main memory."""
        if self._spec.island.memory == RAM:
            return None
        if not isinstance(built.outer, PeriodicOuter):
            raise ConfigError(
                "this outer strategy sends while it trains: its vectors have to be in memory",
                given=f"outer = {built.strategy!r} in [strategy], memory = {DISK!r} in [island]",
                expected="diloco, average or slowmo",
                remedy=f"memory = {RAM!r} in [island]",
            )
        return HostModelOnDisk(folder)

    def _rested(self, outer: Outer) -> None:
        """Free memory that only rounds need, until the next round."""
        if self._disk is not None:
            held = list(self._whole.parameters()) + list(self._whole.buffers())
            known = {id(tensor) for tensor in held}
            own = [t for t in iter_tensors([outer]) if id(t) not in known]
            self._disk.take(own, besides=held)
            self._disk.let_go()
        now = time.monotonic()
        if now - self._gave_back >= BETWEEN_S:
            self._gave_back = now
            trim_heap()

    def _sample(self, built: Built) -> list[Tensor]:
        """Return a batch with which a pipeline measures the time of its units."""
        if self._mesh["pipeline"].size() == 1:
            return []
        return list(next(iter(built.held_out(batch=self._spec.train.batch))))

    def seed(self, *, slot: int, step: int) -> None:
        """Seed dropout on all ranks, differently for every member and start.

        `step` is the step at which training starts.
        """
        own = self._spec.job.seed * 1_000 + slot + 1  # at step 0 as without an island
        self.broadcaster.call(SEED, seed=own + STEPS_APART * step)

    @property
    def scaler(self) -> RemoteScaler:
        """The scale of the loss, on all ranks."""
        return RemoteScaler(self.broadcaster, self._worker)

    def inner(self) -> Inner:
        """Return how a step is computed."""
        return IslandLeader(self.broadcaster, self._host_model, after_round=self._rested)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, computed by all ranks."""
        found: Tensor = self.broadcaster.call(LOSS, [inputs, targets])
        return found


@contextlib.contextmanager
def entered(
    spec: JobSpec, *, place: RankPlace, start: StartReport, orders: Orders | None = None
) -> Iterator[TrainerIsland]:
    """Run the block as a rank of an island; collective.

    Args:
        spec: The job.
        place: Which rank this is.
        start: Where it reports how far it has come at its start.
        orders: Where the ranks go on; None: they stay.

    Raises:
        ConfigError: the mesh has another number of ranks, or this rank has no device.
    """
    limit_heap()
    device = device_of(place, wanted=spec.job.device)
    start.enter(StartPhase.MEETING)
    with world(place, device=device, timeout_s=spec.island.timeout_s):
        mesh = build_mesh(spec.mesh, device=device)
        broadcaster = CommandBroadcaster(rank=place.rank, ranks=place.ranks, start=start)
        start.enter(StartPhase.PREPARING if place.leads else StartPhase.WAITING)
        yield TrainerIsland(spec, broadcaster, mesh=mesh, device=device, orders=orders)


@contextlib.contextmanager
def leading(
    spec: JobSpec, *, place: RankPlace, start: StartReport, orders: Orders
) -> Iterator[TrainerIsland]:
    """Run the block as an island's first rank; afterwards the others end, or move with it.

    Raises:
        ConfigError: the mesh has another number of ranks, or this rank has no device.
    """
    with entered(spec, place=place, start=start, orders=orders) as island:
        try:
            yield island
        except Moved as moved:
            island.broadcaster.end(moved.order.number)
            raise
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was raised first is what counts
                island.broadcaster.end()
            raise
        island.broadcaster.end()
