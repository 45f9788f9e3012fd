"""The work of a job on each machine (model, batch, steps), and how long a step takes there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet, Machine
from atoll.strategies.resolve import Resolved

if TYPE_CHECKING:
    from torch import nn

    from atoll.strategies.base import Outer, Traffic

FLOPS_PER_PARAMETER = 6.0
"""Of one token, forward and backward (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361)."""
UTILISATION = 0.3
"""Share of the speed of large matrix products that training reaches: small models less, large
models on accelerators more. A guess that a measured step replaces."""
GUESS_FACTOR = 2.5
"""An estimated step is right within this factor."""
FAR_OFF = 10.0
"""A measured step that is so many times faster than the estimate contradicts it."""
MEASURED_ERROR = 0.1
"""A measured step is right within this share."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step on one machine, and what the number rests on."""

    seconds: float
    low: float
    high: float
    ground: str


@dataclass(frozen=True, eq=False)
class Workload:
    """One job, apart from its method."""

    name: str
    parameters: int
    """Trained values."""
    elements: int
    """Trained values and floating-point buffers: what members exchange."""
    tokens: int
    """Tokens (or images) of one step of one member."""
    steps: int
    """Of each member, as the job says."""
    optimizer: str
    needs_bytes: int = 0
    """Peak memory of a member without the method's own vectors; 0: not known."""
    model: nn.Module | None = field(default=None, repr=False)
    """On torch's device `meta`, for exact traffic; None: a transformer of that size."""
    unit: str = "tokens"
    paced: bool = True
    """Whether slower members do fewer steps in a period; not in scripts."""

    def step_on(self, machine: Machine) -> Step:
        """Return the seconds of a step.

        Raises:
            ConfigError: nothing is known of the machine's speed.
        """
        if machine.step_s:
            error = 1 + MEASURED_ERROR
            ground = "measured" + self._contradiction(machine)
            return Step(machine.step_s, machine.step_s / error, machine.step_s * error, ground)
        if not machine.gflops:
            raise ConfigError(
                "the speed of a machine is not known", given=machine.name,
                expected="step_s (seconds of a step of this job) or gflops",
                remedy="atoll plan probe job.toml on that machine, or atoll doctor",
            )  # fmt: skip
        seconds = self._estimate_s(machine)
        return Step(
            seconds, seconds / GUESS_FACTOR, seconds * GUESS_FACTOR,
            f"estimated from {machine.gflops:g} GFLOP/s, right within a factor of {GUESS_FACTOR:g}",
        )  # fmt: skip

    def _estimate_s(self, machine: Machine) -> float:
        flops = FLOPS_PER_PARAMETER * self.parameters * self.tokens
        return flops / (machine.gflops * 1e9 * UTILISATION)

    def _contradiction(self, machine: Machine) -> str:
        """Return in words that a measured step is faster than the machine can be; or nothing."""
        if not machine.gflops or self._estimate_s(machine) < FAR_OFF * machine.step_s:
            return ""  # small models may well be slower than their arithmetic
        least_s = UTILISATION * self._estimate_s(machine)
        return (
            f", although {machine.gflops:g} GFLOP/s need {least_s:.3g} s or more: one of both is "
            "wrong"
        )

    def fits(self, machine: Machine, *, vectors: float) -> bool | None:
        """Return whether a member fits; None: not known. `vectors` are the method's own."""
        if not machine.memory_gb or not self.needs_bytes:
            return None
        return self.needs_bytes + 4 * self.elements * vectors <= machine.memory_gb * 1e9


def workload_of(spec: JobSpec) -> Workload:
    """Return what a job file asks; loads torch, allocates nothing.

    Raises:
        ConfigError: it is no job of the built-in trainer whose members hold the whole model.
    """
    if spec.kind != "trainer" or spec.swarm.stages or spec.dipaco.modules:
        raise ConfigError(
            "no method can be chosen for this job",
            given=f"a job of kind {spec.kind!r}" if spec.kind != "trainer" else "a model in parts",
            expected="a job of the built-in trainer whose members hold the whole model",
            remedy="its method is in its own code, or fixed by [swarm] or [dipaco]",
        )
    import torch

    from atoll.data import is_images
    from atoll.plan.memory import plan_memory, sizes_of
    from atoll.train.build import whole_model

    data = sizes_of(spec)
    # The memory of a member by itself: what a method needs on top is counted per candidate.
    table = dataclasses.replace(
        spec.strategy, preset="alone", outer="", codec="fp32", collective="auto",
        aggregate="mean", options={},
    )  # fmt: skip
    alone = dataclasses.replace(spec, strategy=table)
    memory = plan_memory(alone, data=data)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: Any = whole_model(spec, data)
    images = is_images(spec.data.corpus)
    length = 1 if images else int(model.config.context)
    saved = model.state_dict().keys()  # others are made anew by each member, and not exchanged
    buffers = sum(
        buffer.numel()
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point()
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Workload(
        name=spec.model.name, parameters=trained, elements=trained + buffers,
        tokens=spec.train.batch * length, steps=spec.train.steps,
        optimizer=spec.train.optimizer, needs_bytes=memory.worst_bytes, model=model,
        unit="images" if images else "tokens",
        paced=spec.train.pace == "measured" and spec.job.trust != "audit",
    )  # fmt: skip


class TrafficOf:
    """The traffic of methods on one workload, by the strategies' own accounting."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._outers: dict[tuple[object, ...], Outer] = {}
        self._known: dict[tuple[object, ...], Traffic] = {}

    def __call__(self, resolved: Resolved, *, peers: int, steps: int) -> Traffic:
        """Return what the first member sends and receives in so many steps.

        Raises:
            ConfigError: an option or the codec is out of range for this model.
        """
        key = (resolved.method, resolved.codec, resolved.aggregation.collective)
        if key not in self._outers:
            self._outers[key] = self._set_up(resolved, steps=steps)
        if (*key, peers, steps) not in self._known:
            found = self._outers[key].traffic(self._workload.elements, peers, steps=steps)
            self._known[*key, peers, steps] = found
        return self._known[*key, peers, steps]

    def _set_up(self, resolved: Resolved, *, steps: int) -> Outer:
        """Return the strategy after its setup on the real shapes, which allocates nothing."""
        import torch

        from atoll.codec.registry import make_codec
        from atoll.group.single import SingleGroup
        from atoll.task import Task
        from atoll.train.optim.lazy_compiler import leave_out_compiler

        leave_out_compiler()
        outer, codec = resolved.build(), make_codec(resolved.codec)
        group = SingleGroup()
        group.aggregation = resolved.aggregation
        with torch.device("meta"):
            optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad])
            task = Task(self._model, optimizer, member="w0", last=steps)
            outer.setup(task, group=group, codec=codec)
        return outer

    @functools.cached_property
    def _model(self) -> nn.Module:
        import torch

        from atoll.strategies.measured_traffic import Shapes

        if self._workload.model is not None:
            return self._workload.model
        with torch.device("meta"):
            return Shapes(self._workload.elements)


def spread(values: Sequence[Step]) -> tuple[float, float]:
    """Return how far the slowest may be off, as factors below and above it."""
    worst = max(values, key=lambda step: step.seconds)
    return worst.low / worst.seconds, worst.high / worst.seconds


def speeds(workload: Workload, fleet: Fleet) -> Mapping[str, Step]:
    """Return the step of every machine; raises ConfigError if one is not known."""
    return {machine.name: workload.step_on(machine) for machine in fleet.machines}


@functools.cache
def gain_exponent(base: float, value: float, worst: float) -> float:
    """Return the share of the gain from `worst` to `base`, in logarithms, that `value` keeps."""
    return min(1.0, max(0.0, math.log(worst / value) / math.log(worst / base)))
