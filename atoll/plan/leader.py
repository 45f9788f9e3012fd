"""Main memory that the first rank of an island needs for rounds with other members.

Vectors of the outer strategy are counted on a meta model; those created in later rounds are
declared in the tables (`later_vectors`, `kept_vectors`). Tests compare both with real strategies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.config import JobSpec
from atoll.group.single import SingleGroup
from atoll.methods.codecs import CODECS
from atoll.strategies.resolve import Resolved
from atoll.strategies.vectors.flat import iter_tensors
from atoll.task import Task, real_numel
from atoll.train.build import whole_model
from atoll.train.optim.optimizers import build_optimizer

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LeaderMemory:
    """Bytes of main memory."""

    host_model: int
    """The whole model, as exchanged with other members."""
    outer: int
    """Outer strategy and codec, permanently."""
    exchange: int
    """During a round: own values in fp32, the mean, and packets."""
    largest: int


class _Island:
    """`Task.elsewhere` of an island that does not train."""

    def __init__(self, task: Task) -> None:
        self.vector = torch.empty(task.num_parameters + sum(map(real_numel, task.buffers())))

    def pull(self) -> None:
        pass

    def push(self) -> None:
        pass

    def spoil(self) -> None:
        pass


def leader_memory(
    spec: JobSpec, resolved: Resolved, dataset: Any = None, *, spread: bool = False
) -> LeaderMemory:
    """Return what a member needs for rounds with others.

    `spread`: the member is an island; some methods then work in place on the host model. Raises
    ConfigError if an option or the codec is invalid.
    """
    method, codec = resolved.method, make_codec(resolved.codec)
    outer = resolved.build()
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = whole_model(spec, dataset)
        task = Task(model, build_optimizer(model, spec.train), member="w0", last=spec.train.steps)
        if spread:
            task.elsewhere = island = _Island(task)
        outer.setup(task, group=SingleGroup(), codec=codec)
    held = {_key(t): t for t in (*model.parameters(), *model.buffers())}
    sizes = [t.untyped_storage().nbytes() for t in held.values()]
    host_model, largest = sum(sizes), max(sizes, default=0)
    known = {*held, *([_key(island.vector)] if spread else [])}
    vectors = {_key(t): t for t in iter_tensors([outer, codec]) if _key(t) not in known}
    elements = task.num_parameters + sum(map(real_numel, task.buffers()))
    kept = sum(t.untyped_storage().nbytes() for t in vectors.values())
    if not method.exchanges:
        return LeaderMemory(host_model, kept, 0, largest)
    words = CODECS.keys() & re.findall(r"[a-z][a-z0-9_]*", resolved.codec)
    later = method.later_vectors + sum(CODECS[word].kept_vectors for word in words)
    packets = 2 * codec.nbytes(elements)
    outer_bytes = kept + round(later * FLOAT_BYTES * elements)
    return LeaderMemory(host_model, outer_bytes, 2 * FLOAT_BYTES * elements + packets, largest)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
