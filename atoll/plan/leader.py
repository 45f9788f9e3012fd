"""What the first rank of an island keeps in main memory for its dealings with other members.

The outer strategy is set up on a model without memory, and the vectors that it then holds are
counted. What it makes only in its first rounds is declared by the rows of the method and of the
codec (`later_vectors`, `kept_vectors`); tests compare both with strategies that have run.
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
from atoll.task import Task
from atoll.train.build import whole_model
from atoll.train.optim.optimizers import build_optimizer

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LeaderMemory:
    """Bytes of main memory."""

    host_model: int
    """The whole model, as other members see it."""
    outer: int
    """Of the outer strategy and the codec, all the time."""
    exchange: int
    """During a round: the own values as they are sent, the mean of all, and packets."""
    largest: int
    """The largest of the model's tensors."""


class _Island:
    """`Task.elsewhere` of an island that trains nothing."""

    def __init__(self, task: Task) -> None:
        self.vector = torch.empty(task.num_parameters + sum(b.numel() for b in task.buffers()))

    def pull(self) -> None:
        pass

    def push(self) -> None:
        pass

    def spoil(self) -> None:
        pass


def leader_memory(
    spec: JobSpec, resolved: Resolved, dataset: Any = None, *, spread: bool = False
) -> LeaderMemory:
    """Return what a member keeps for rounds with others.

    Args:
        spec: The job.
        resolved: Its strategy.
        dataset: What it trains on, if the model's size depends on it.
        spread: The member is an island: some methods work in the memory of its host model.

    Raises:
        ConfigError: an option or the codec is unknown or out of range.
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
    elements = task.num_parameters + sum(b.numel() for b in task.buffers())
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
