"""Predicts the memory of a member of a SWARM, for every stage, without allocating it.

As in `memory.py` the stages take one microbatch on fake tensors. What a member keeps beside that
follows from `strategies/inner/swarm/runner.py`: sums in float64, the inputs of microbatches that
are not done, and gradients that are not added to the sum yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.config import JobSpec
from atoll.config.swarm_tables import with_swarm
from atoll.data import TrainingData
from atoll.plan.costs import swarm_cuts, unit_flops, work_of
from atoll.plan.cutting import faked
from atoll.plan.leader import FLOAT_BYTES, leader_memory
from atoll.plan.memory import PROGRAM_BYTES, device_kind, sample, sizes_of
from atoll.plan.ranks import optimizer_bytes
from atoll.plan.stages import StageOutput, run_units
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.model_facts import hidden_matrices
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.pipeline.cuts import trained_units
from atoll.strategies.inner.pipeline.stages import chain_of, cut_up, words_of
from atoll.strategies.inner.precision import precision_on
from atoll.strategies.inner.swarm.stage import StageCut, cuts_of, refuse_shared
from atoll.train.build import whole_model
from atoll.train.optim.optimizers import build_optimizer
from atoll.train.partly import building_bytes

GRADIENT_BYTES = 12
"""Of a parameter: the sum of a step in float64, and the mean."""
OTHER_STEP_BYTES = 12
"""Of a parameter, in an asynchronous schedule: older weights, and another sum."""
HELD = 4
"""Microbatches whose inputs a member keeps: as many as a driver has under way."""
PENDING = 2
"""Microbatches with gradients that wait to be added to the sum: one that was just computed, and one
that the ledger has not confirmed yet."""

COPIES = 4
"""Vectors for copies of sums: the own one that is sent, one that is kept, and one that is received,
with its message."""
IMAGES = 2
"""Copies of a stage's state: one that a checkpoint is written from, one for members that join."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a member that serves a stage; on its accelerator, if it has one."""

    parameters: int
    gradients: int
    """The step's sum in float64, and the mean with which the optimizer steps."""
    optimizer: int
    buffers: int
    inputs: int
    """Of microbatches that are not done."""
    pending: int
    """Gradients that are not added to the sum yet."""
    other_step: int = 0
    """Of an asynchronous schedule: the weights of the step before, the sum of the one after."""
    activations: int
    working: int

    @property
    def state(self) -> int:
        """The part that a checkpoint saves."""
        return self.parameters + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """All together."""
        return sum(int(getattr(self, part.name)) for part in fields(self))


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage of a plan."""

    words: str
    """Names of its units."""
    elements: int
    """Trained parameters."""
    memory: StageMemory
    flops: float
    """Floating-point operations of both passes of a microbatch."""
    round_bytes: int = 0
    """Main memory of the outer method, and of a round."""
    copies_bytes: int = 0
    """Main memory of copies of sums, see `swarm/copies.py`; none with one member per stage."""
    images_bytes: int = 0
    """Main memory of copies of its state: for a checkpoint, and for members that join."""
    building_bytes: int = 0
    """Main memory that building it takes at most, before it is trained."""

    @property
    def beside_bytes(self) -> int:
        """Main memory besides what computes."""
        return self.round_bytes + self.copies_bytes + self.images_bytes


@dataclass(frozen=True, kw_only=True)
class SwarmPlan:
    """The memory of the members of a SWARM, by stage."""

    spec: JobSpec
    device: str
    elements: int
    """Parameters of the whole model."""
    model_bytes: int
    """Parameters and buffers of the whole model."""
    whole: str
    """Why a member builds the whole model before it takes its stage out; empty: it does not."""
    rows: int
    """Of a microbatch."""
    most_stages: int
    """Units with weights, each of which may be a stage."""
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]

    def main_bytes(self, stage: StagePlan) -> int:
        """Return the peak main memory of a member."""
        held = stage.memory.total if self.device == "cpu" else 0
        return PROGRAM_BYTES + max(held + stage.beside_bytes, stage.building_bytes)

    def needs_bytes(self, stage: StagePlan) -> int:
        """Return the memory of the device that computes."""
        return self.main_bytes(stage) if self.device == "cpu" else stage.memory.total

    @property
    def balance(self) -> float:
        """Mean work of a stage, as a share of the busiest stage's."""
        work = [stage.flops for stage in self.stages]
        return sum(work) / (len(work) * max(work)) if any(work) else 1.0

    @property
    def worst(self) -> int:
        """The stage that needs most."""
        needs = [self.needs_bytes(stage) for stage in self.stages]
        return needs.index(max(needs))

    @property
    def worst_bytes(self) -> int:
        """Memory of the stage that needs most."""
        return self.needs_bytes(self.stages[self.worst])


def plan_swarm(spec: JobSpec, *, data: TrainingData | None = None) -> SwarmPlan:
    """Predict the memory of every stage; `data` is the result of `sizes_of`.

    Raises:
        ConfigError: the job is invalid, or its model cannot be cut into these stages.
        DataError: its data are missing.
    """
    resolved = check_job(spec)
    device = device_kind(spec)
    precision = precision_on(spec.train.precision, torch.device(device))
    spec = replace(spec, train=replace(spec.train, precision=precision))
    dataset = data if data is not None else sizes_of(spec)
    rows = spec.train.batch // spec.swarm.microbatches
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            model = whole_model(spec, dataset)
        with FakeTensorMode():
            faked(model)
            most, at, stages = _stages(spec, model, *sample(dataset, model, rows=rows))
    whole = {id(t): t for t in (*model.parameters(), *model.buffers())}
    leader = leader_memory(spec, resolved, dataset)
    elements = sum(p.numel() for p in model.parameters())
    # A method that combines the gradients of every step keeps no vectors between steps.
    kept = 0 if spec.meets_every_step else leader.outer
    share = (kept + leader.exchange) / max(1, elements)
    model_bytes = sum(t.numel() * t.element_size() for t in whole.values())
    size = ActivationFormat.of(spec.swarm.codec).size
    cut = StageCut(stages=len(stages), cuts=at, size=size)
    reason, building = building_bytes(spec, dataset, cut, whole_bytes=model_bytes)
    several = spec.job.nodes - spec.swarm.whole > spec.swarm.stages
    beside = [
        replace(
            one, round_bytes=round(share * one.elements), building_bytes=most_bytes,
            copies_bytes=COPIES * FLOAT_BYTES * one.elements if several else 0,
            images_bytes=IMAGES * one.memory.state,
        )
        for one, most_bytes in zip(stages, building, strict=True)
    ]  # fmt: skip
    return SwarmPlan(
        spec=spec,
        device=device,
        elements=elements,
        model_bytes=model_bytes,
        whole=reason,
        rows=rows,
        most_stages=most,
        cuts=at,
        stages=tuple(beside),
    )


def fewest_stages(
    spec: JobSpec, *, limit_bytes: int, data: TrainingData | None = None
) -> SwarmPlan | None:
    """Return the plan with the fewest stages of which each fits; None: none does.

    Found by bisection, which assumes that more stages never make the largest one larger.
    """
    low, high = 1, plan_swarm(spec, data=data).most_stages
    found: SwarmPlan | None = None
    while low <= high:
        middle = (low + high) // 2
        tried = with_swarm(
            replace(spec, swarm=replace(spec.swarm, stages=middle, needs_gb=[], cuts=[])),
            nodes_set=False,
        )
        plan = plan_swarm(tried, data=data)
        if plan.worst_bytes <= limit_bytes:
            found, high = plan, middle - 1
        else:
            low = middle + 1
    return found


def _stages(
    spec: JobSpec, model: Any, inputs: Tensor, targets: Tensor
) -> tuple[int, tuple[int, ...], list[StagePlan]]:
    """Return the most stages there can be, the cuts, and the stages; on fake tensors."""
    model.train()
    cut = StageCut(
        stages=spec.swarm.stages, cuts=tuple(spec.swarm.cuts), precision=spec.train.precision
    )
    units, _ = chain_of(model)
    at = cuts_of(model, cut, tried=False)  # by weights, as a member does without cuts in the job
    flops = unit_flops(units, inputs)
    own_code = ":" in spec.model.name  # which does not run where jobs are submitted
    if not cut.cuts and any(flops) and not own_code:
        at = tuple(swarm_cuts(units, flops, stages=cut.stages))
    cut_units = cut_up(units, at)
    costs = [sum(flops[a:b]) for a, b in itertools.pairwise((0, *at, len(units)))]
    refuse_shared(cut_units, model)
    hidden = hidden_matrices(model)
    found: list[StagePlan] = []
    values: tuple[Tensor, ...] = (inputs,)
    for own in cut_units:
        last = len(found) + 1 == len(cut_units)
        passed, outputs = run_units(
            own, values, targets if last else None, criterion=model.criterion,
            precision=cut.precision,
        )  # fmt: skip
        received = sum(v.nbytes for v in values)
        memory = _memory(spec, own, passed, received=received, hidden=hidden)
        trained = memory.gradients // GRADIENT_BYTES
        work = work_of(costs[len(found)], last=last)
        found.append(StagePlan(words=words_of(own), elements=trained, memory=memory, flops=work))
        values = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in outputs)
    return len(trained_units(units)), at, found


def _memory(
    spec: JobSpec, own: Sequence[nn.Module], passed: StageOutput, *, received: int,
    hidden: Sequence[nn.Parameter],
) -> StageMemory:  # fmt: skip
    module = nn.ModuleList(own)
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    held = {id(p) for p in parameters}
    optimizer = build_optimizer(module, spec.train, hidden=[p for p in hidden if id(p) in held])
    state = optimizer_bytes(optimizer)
    return StageMemory(
        parameters=sum(p.nbytes for p in parameters),
        gradients=GRADIENT_BYTES * trained,
        other_step=OTHER_STEP_BYTES * trained if spec.swarm.early_microbatches else 0,
        optimizer=state,
        buffers=sum(b.nbytes for b in module.buffers()),
        inputs=HELD * received,
        pending=PENDING * FLOAT_BYTES * trained,
        activations=passed.kept,
        working=passed.working,
    )
