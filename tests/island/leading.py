"""One member that is a whole world of ranks, in few lines: for tests of what a leader does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from atoll.codec.registry import make_codec
from atoll.config import MeshShape, TrainTable
from atoll.group.single import SingleGroup
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.world import build_mesh
from atoll.methods.periodic import NoSync as AloneOptions
from atoll.strategies.base import Inner, Outer
from atoll.strategies.inner.divide import split_model
from atoll.strategies.inner.host_model import HostModel
from atoll.strategies.inner.leader import IslandLeader
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.remote_optimizer import RemoteOptimizer, RemoteScaler
from atoll.strategies.inner.worker import BUILD, Divide, Worker
from atoll.task import Task
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from tests.island.reference import CPU, batch_for, gpt
from tests.island.reference import MODELS as OTHERS

STEPS, ROWS = 4, 8
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **OTHERS,
    "single": lambda: gpt().float(),
    "even": lambda: gpt(vocab_size=18),  # its vocabulary can be halved
}


@dataclass
class Member:
    """What trains: a leader with its ranks, or a process by itself."""

    task: Task
    inner: Inner
    outer: Outer
    broadcaster: CommandBroadcaster | None = None

    def train(self, steps: int = STEPS, *, first: int = 1) -> list[tuple[float, float]]:
        """Do steps; return loss and norm of each."""
        found = []
        for seed in range(first, first + steps):
            batch = batch_for(self.task.model, rows=ROWS, seed=seed)
            done = self.inner.step(self.task, batch, self.outer)
            found.append((float(done.loss or 0.0), float(done.grad_norm or 0.0)))
        return found

    def parameters(self) -> dict[str, Tensor]:
        self.task.pull()
        return {n: p.detach().clone() for n, p in self.task.model.named_parameters()}


def table(**words: Any) -> TrainTable:
    return TrainTable(**{"steps": 20, "lr": 0.01, "warmup": 3, "clip": 0.5, "batch": ROWS} | words)


def task_of(model: nn.Module, train: TrainTable) -> Task:
    optimizer = build_optimizer(model, train)
    return Task(model, optimizer, StepSchedule(optimizer, learning_rate(train)), last=train.steps)


def by_itself(name: str, train: TrainTable, **words: Any) -> Member:
    """Return a member of one process, which trains the usual way."""
    task = task_of(MODELS[name](), train)
    local = Local(language_model_loss, clip=train.clip, options=InnerOptions(**words))
    task.scaler = local.scaler
    return Member(task, local, outer_of(task))


def outer_of(task: Task) -> Outer:
    outer: Outer = AloneOptions(every=1000).build()
    outer.setup(task, group=SingleGroup(), codec=make_codec("fp32"))
    return outer


def worker_of(
    broadcaster: CommandBroadcaster,
    model: Callable[[], nn.Module],
    train: TrainTable,
    axes: Mapping[str, int],
    divided: Divide = split_model,
    **words: Any,
) -> Worker:
    def make() -> tuple[nn.Module, Any]:
        made = model()
        return made, build_optimizer(made, train)

    options = InnerOptions(shape=MeshShape(**axes), clip=train.clip, **words)
    return Worker(
        broadcaster, mesh=build_mesh(options.shape, device=CPU), device=CPU, options=options,
        make=make, divided=divided,
    )  # fmt: skip


def led(
    use: Callable[[Member], Any], name: str, train: TrainTable, axes: Mapping[str, int],
    keep: list[Worker] | None = None, **words: Any,
) -> Any:  # fmt: skip
    """Return what `use` returns on the first of all ranks, which it leads; None on the others.

    The rank's worker is put into `keep`.
    """
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    worker = worker_of(broadcaster, MODELS[name], train, axes, **words)
    if keep is not None:
        keep.append(worker)
    if not broadcaster.leads:
        broadcaster.serve()
        return None
    task = task_of(MODELS[name](), train)
    member = Member(task, lead(task, broadcaster, worker), outer_of(task), broadcaster)
    try:
        return use(member)
    finally:
        broadcaster.end()


def lead(task: Task, broadcaster: CommandBroadcaster, worker: Worker) -> IslandLeader:
    """Make a task's model the host model of what the ranks train."""
    named = dict(task.model.named_parameters())
    worker.host_tensors = {**named, **dict(task.model.named_buffers())}
    rows = batch_for(task.model, rows=ROWS) if axis_size(worker, "pipeline") > 1 else ()
    broadcaster.call(BUILD, rows)
    host_model = HostModel(broadcaster, constrained=worker.constrained)
    task.elsewhere = host_model
    task.optimizer = RemoteOptimizer(
        task.optimizer, names=named, broadcaster=broadcaster, worker=worker
    )
    task.scaler = RemoteScaler(broadcaster, worker)
    task.push()
    return IslandLeader(broadcaster, host_model)


def count_calls(member: Member) -> list[str]:
    """Return the verbs of all commands from now on."""
    assert member.broadcaster is not None
    told, call = [], member.broadcaster.call

    def counted(verb: str, *args: Any, **values: Any) -> Any:
        told.append(verb)
        return call(verb, *args, **values)

    member.broadcaster.call = counted  # type: ignore[method-assign]
    return told


def axis_size(worker: Worker, axis: str) -> int:
    return int(worker.mesh[axis].size())


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= within * max(1.0, float(tensor.abs().max())), f"{name}: {worst}"
