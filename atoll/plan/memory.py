"""Predicts the memory of every rank of an island from a job file, without allocating it.

The model is cut as for the ranks and takes one step on fake tensors, counting live ones
(`tracking.py`). Only temporary memory of sharding and passes kept by a pipeline are formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.config import JobSpec
from atoll.data import ImageDataset, TrainingData, is_images
from atoll.devices.choose import AUTO, accelerator, choose
from atoll.errors import ConfigError
from atoll.plan.cutting import faked
from atoll.plan.leader import leader_memory
from atoll.plan.ranks import Maker, RankMemory
from atoll.plan.stages import Cut
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.options import ASYNC, InnerOptions
from atoll.strategies.inner.pipeline.lookahead import check_lookahead
from atoll.strategies.inner.precision import precision_on
from atoll.train.build import check_data, load_data, whole_model
from atoll.train.optim.optimizers import build_optimizer

GATHERED = 3
"""Maximum copies of a gathered tensor: send buffer, receive buffer, and in order. Ranks that hold
whole rows receive them in place.
"""

PROGRAM_BYTES = 350_000_000
"""Main memory of Python, torch and Atoll without a model; measured on Linux."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of an island."""

    spec: JobSpec
    ranks: tuple[RankMemory, ...]
    elements: int
    """Parameters of the whole model."""
    model_bytes: int
    """Parameters and buffers of the whole model."""
    rows: int
    """Rows of a batch that pass through a rank at once."""
    held: int
    """Maximum passes kept for backward on any rank."""
    cuts: tuple[int, ...]
    """Units before which a pipeline is cut."""
    guessed: bool
    """The cuts are estimated from the number of weights; a run measures instead."""
    device: str

    @property
    def several(self) -> bool:
        """Whether a member has several processes."""
        return len(self.ranks) > 1

    def start_bytes(self, rank: RankMemory) -> int:
        """Return the main memory that a rank needs to load its part.

        The first rank may hold the model twice; the others receive their parts piece by piece.
        """
        return 2 * rank.host_model if self.several else self.model_bytes

    def main_bytes(self, rank: RankMemory) -> int:
        """Return the peak main memory of a rank, in a step or between two."""
        kept, step = rank.leading, 0
        if self.device == "cpu":
            kept += rank.static - rank.gradients
            step = rank.gradients + rank.passing
        elif self.spec.island.offload:
            kept += rank.static
        return PROGRAM_BYTES + max(kept + max(step, rank.between), self.start_bytes(rank))

    def device_bytes(self, rank: RankMemory) -> int:
        """Return the peak accelerator memory of a rank; 0 without one."""
        if self.device == "cpu":
            return 0
        return rank.passing + (0 if self.spec.island.offload else rank.static)

    @property
    def worst_bytes(self) -> int:
        """Peak of any rank on its compute device."""
        count = self.main_bytes if self.device == "cpu" else self.device_bytes
        return max(count(rank) for rank in self.ranks)


def plan_memory(spec: JobSpec, *, data: TrainingData | None = None) -> MemoryPlan:
    """Predict the memory of every rank of a member; `data` is the result of `sizes_of`.

    Raises:
        ConfigError: the job is invalid, or not one of the built-in trainer.
        DataError: its data are missing.
    """
    if spec.kind != "trainer":
        raise ConfigError(
            "the memory of this job cannot be predicted",
            given=f"a job of kind {spec.kind!r}",
            expected="a job of the built-in trainer: [model], [train] and [strategy]",
        )
    resolved = check_job(spec)
    device = device_kind(spec)
    precision = precision_on(spec.train.precision, torch.device(device))
    spec = replace(spec, train=replace(spec.train, precision=precision))
    dataset = data if data is not None else sizes_of(spec)
    options = InnerOptions.of(spec)
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            model = whole_model(spec, dataset)
        with FakeTensorMode():
            faked(model)
            ranks, cut, held, elements, model_bytes = _ranks(spec, options, dataset, model)
    several = len(ranks) > 1
    leader = leader_memory(spec, resolved, dataset, spread=several)
    first = replace(ranks[0], outer=leader.outer, exchange=leader.exchange)
    if several:
        first = replace(first, host_model=leader.host_model, checkpoint=GATHERED * leader.largest)
    else:
        image = _image(first, model_bytes=model_bytes, outer=leader.outer)
        first = replace(first, image=image)
    return MemoryPlan(
        spec=spec, ranks=(first, *ranks[1:]), elements=elements, model_bytes=model_bytes,
        rows=cut.rows, held=held, cuts=cut.cuts, device=device,
        guessed=bool(cut.cuts) and not options.cuts,
    )  # fmt: skip


def _image(only: RankMemory, *, model_bytes: int, outer: int) -> int:
    return model_bytes + only.optimizer + outer


def _ranks(
    spec: JobSpec, options: InnerOptions, dataset: TrainingData | None, model: Any
) -> tuple[list[RankMemory], Cut, int, int, int]:
    whole = {id(t): t for t in (*model.parameters(), *model.buffers())}
    model_bytes = sum(t.numel() * t.element_size() for t in whole.values())
    elements = sum(p.numel() for p in model.parameters())
    optimizer = build_optimizer(model, spec.train)
    if options.schedule == ASYNC and options.shape.pipeline > 1:
        check_lookahead(optimizer)
    names = {p: name for name, p in model.named_parameters()}
    groups = {
        names[p]: number
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    cut = Cut(model, options, batch=spec.train.batch)
    places = cut.places(*sample(dataset, model, rows=cut.rows))
    maker = Maker(options, optimizer, groups)
    found = []
    known: dict[tuple[int, int], RankMemory] = {}
    for number in range(options.shape.ranks):
        place = options.shape.place(number)
        # all other coordinates have parts of the same sizes
        alike = place["pipeline"], place["shard"]
        if alike not in known:
            known[alike] = maker.rank(number, place, places[place["pipeline"]])
        found.append(replace(known[alike], rank=number, place=place))
    return found, cut, max(each.held for each in places), elements, model_bytes


def sizes_of(spec: JobSpec) -> TrainingData | None:
    """Return a job's data if the size of its model depends on them; None: nothing is read.

    Raises:
        ConfigError: the data are unknown or do not fit the model.
        DataError: they are missing or too small.
    """
    check_data(spec)
    needs_data = is_images(spec.data.corpus) or spec.data.tokenizer.startswith("bpe")
    return load_data(spec) if needs_data else None


def sample(data: TrainingData | None, model: Any, *, rows: int) -> tuple[Tensor, Tensor]:
    """Return dummy inputs and targets with `rows` rows."""
    if isinstance(data, ImageDataset):
        shape = (data.train.channels, data.train.side, data.train.side)
        return torch.zeros(rows, *shape), torch.zeros(rows, dtype=torch.int64)
    ids = torch.zeros(rows, model.config.context, dtype=torch.int64)
    return ids, torch.zeros_like(ids)


def device_kind(spec: JobSpec) -> str:
    """Return the kind of the compute device.

    For `auto` that of machines as the job needs them, else of this machine.
    """
    kind = spec.job.device.partition(":")[0]
    if kind != AUTO:
        return kind
    needed = bool(spec.needs.gpu or spec.needs.gpu_memory_gb)
    if needed:
        return accelerator() or "cuda"
    ranks = spec.mesh.ranks // spec.island.machines
    return choose(AUTO, local_ranks=ranks).type
