"""For scripts written for Horovod: the part of its interface that most of them use.

import atoll.integrations.horovod as hvd      # instead of: import horovod.torch as hvd

hvd.init()
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Interface: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch. `atoll run
script.py --nodes 4` takes the place of `horovodrun`. Differs:

* a lost member does not end the run: the others go on, and means are over the remaining ones;
* a process that comes later gets parameters and optimizer from the others;
* `size` is the number of members that the job was started with, so shares of the data stay as they
  are; :func:`members` is the number in the last round;
* all gradients are averaged in `step`, so gradients are clipped before that, each member's own.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import ConfigError, GroupError
from atoll.run import Run, join

Average, Sum, Min, Max = "mean", "sum", "min", "max"
"""Operations of :func:`allreduce`."""


class Compression:
    """Encodings of gradients, as codecs of Atoll."""

    none = "fp32"
    fp16 = "fp16"


class _Process:
    """This process's run, a global because Horovod's interface consists of functions."""

    run: Run | None = None


def init() -> None:
    """Join the job; call it once, first. The run ends with the script, or with `shutdown`."""
    if _Process.run is None:
        _Process.run = join().__enter__()
        atexit.register(_shut_down_at_exit)


def _shut_down_at_exit() -> None:
    """Leave the job, and end with an exit status that says so: atexit ignores exceptions."""
    try:
        shutdown()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def shutdown() -> None:
    """Leave the job: done, or failed if the script ended by an error."""
    run, _Process.run = _Process.run, None
    if run is None:
        return
    atexit.unregister(_shut_down_at_exit)
    error = getattr(sys, "last_value", None)
    run.__exit__(type(error) if error is not None else None, error, None)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return _Process.run is not None


def the_run() -> Run:
    """Return the run, for everything that Horovod does not have; ConfigError before `init`."""
    if _Process.run is None:
        raise ConfigError(
            "this process has not joined its job", given="a call before init()",
            expected="hvd.init() first",
        )  # fmt: skip
    return _Process.run


def rank() -> int:
    """Return this member's number, from 0."""
    return the_run().slot


def size() -> int:
    """Return the number of members that the job was started with."""
    return the_run().num_slots


def members() -> int:
    """Return the number of members of the last round."""
    return len(the_run().members)


def local_rank() -> int:
    """Return the rank inside the member: 0, since each has one process."""
    return the_run().rank


def local_size() -> int:
    """Return the number of processes of this member."""
    return the_run().ranks


def allreduce(tensor: Tensor, *, name: str = "", op: str = Average) -> Tensor:
    """Return the mean (or `op`) of all members' tensors; see :meth:`atoll.Run.all_reduce`.

    `name` is for readers: calls are matched by their order.
    """
    return the_run().all_reduce(tensor, op)


def allreduce_(tensor: Tensor, *, name: str = "", op: str = Average) -> Tensor:
    """As :func:`allreduce`, in place."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, op=op))


def broadcast(tensor: Tensor, root_rank: int, *, name: str = "") -> Tensor:
    """Return the tensor of a member, bit for bit; see :meth:`atoll.Run.broadcast`."""
    return the_run().broadcast(tensor, _member(root_rank))


def broadcast_(tensor: Tensor, root_rank: int, *, name: str = "") -> Tensor:
    """As :func:`broadcast`, in place."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank))


def broadcast_object(thing: Any = None, root_rank: int = 0, *, name: str = "") -> Any:
    """Return an object of tensors, numbers, texts and containers of the member `root_rank`.

    If rank 0 is lost, the first member stands for it, if its `thing` is not None.

    Raises:
        GroupError: the member that has the object was lost.
    """
    run, own = the_run(), b""
    if rank() == root_rank or (root_rank == 0 and thing is not None):
        stream = io.BytesIO()
        torch.save(thing, stream)
        own = stream.getvalue()
    length = run.broadcast(torch.tensor([len(own)]), _member(root_rank))
    if not length:
        raise GroupError(
            "the member that has the object was lost", given=f"rank {root_rank}",
            expected="a member that takes part", remedy="broadcast from another one",
        )  # fmt: skip
    data = torch.zeros(int(length), dtype=torch.uint8)
    if len(own) == len(data):
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    found = run.broadcast(data, _member(root_rank))
    return torch.load(io.BytesIO(found.numpy().tobytes()), weights_only=True)


def barrier() -> None:
    """Return when every member has called it."""
    the_run().barrier()


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root_rank: int = 0
) -> None:
    """Copy a member's parameters (`model.state_dict()`) to all members, in place.

    A process that comes to a run under way, or resumes it, does nothing here: it gets the present
    parameters from the others, or from the checkpoint, with `DistributedOptimizer`.
    """
    run = the_run()
    if run.takes_over:
        return
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [tensor for _, tensor in pairs if isinstance(tensor, Tensor)]
    with torch.no_grad():
        for own, received in zip(tensors, run.broadcast(tensors, _member(root_rank)), strict=True):
            own.copy_(received)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Copy a member's optimizer state to all members; see :func:`broadcast_parameters`."""
    if the_run().takes_over:
        return
    inner = getattr(optimizer, "inner", optimizer)
    state = broadcast_object(inner.state_dict(), root_rank)
    if rank() != root_rank:
        inner.load_state_dict(state)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    *,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
) -> Optimizer:  # fmt: skip
    """Return an optimizer whose `step` averages the gradients of all members first.

    All members start from the parameters of the first one. This is
    `run.wrap(model, optimizer, outer="ddp")`; on slow links, `run.wrap` with `atoll.DiLoCo` sends
    hundreds of times fewer bytes.

    Args:
        optimizer: Over the parameters.
        named_parameters: As in `model.named_parameters()`; None: those of the optimizer.
        compression: A codec, e.g. `Compression.fp16`, or any other of Atoll.
        backward_passes_per_step: Accepted as in Horovod; accumulated gradients are averaged once,
            in `step`, for any number of passes.
        op: `Average`; others are refused.

    Raises:
        ConfigError: another operation than the mean.
    """
    if op != Average:
        raise ConfigError(
            "gradients are averaged", given=f"op = {op!r}", expected="Average",
            remedy="multiply the learning rate by hvd.size() for the effect of a sum",
        )  # fmt: skip
    if backward_passes_per_step < 1:
        raise ConfigError(
            "a step needs a backward pass", given=backward_passes_per_step, expected="1 or more"
        )
    pairs = list(named_parameters) if named_parameters is not None else []
    if not pairs:
        found = (one for group in optimizer.param_groups for one in group["params"])
        pairs = [(f"parameter_{number}", one) for number, one in enumerate(found)]
    holder = nn.Module()
    for name, parameter in pairs:
        holder.register_parameter(name.replace(".", "_"), parameter)
    wrapped = the_run().wrap(holder, optimizer, outer="ddp", codec=compression)
    return cast(Optimizer, wrapped)


def _member(root_rank: int) -> str:
    """Return the name of a member by its number; the first one that is left stands for rank 0."""
    return "" if root_rank == 0 else f"w{root_rank}"
