"""One stage of a model, cut in one process without torch.distributed.

Members of a SWARM cut the same model at the same places without asking each other, so the cuts MUST
follow from the model and the job alone: from the job's `cuts`, else from the numbers of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.strategies.inner.pipeline.cuts import check_cuts, cuts_by_size
from atoll.strategies.inner.pipeline.stages import (
    Stage,
    chain_of,
    check_chain,
    criterion_alone,
    cut_up,
    names_of,
    shared,
)
from atoll.strategies.inner.precision import dtype_of
from atoll.strategies.inner.untrained_state import untrained_state
from atoll.strategies.inner.whole import Criterion, saved_buffers

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """How a job cuts its model."""

    stages: int
    cuts: tuple[int, ...] = ()
    """Units before which to cut; empty: by the number of weights."""
    precision: str = "fp32"


def cuts_of(model: nn.Module, cut: StageCut, *, sample: Tensor | None = None) -> tuple[int, ...]:
    """Return the units before which to cut a model, the same on every member.

    `sample` are a few rows of inputs, for a model whose units are a guess.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    units, sure = chain_of(model)
    if not 1 <= cut.stages <= len(units):
        raise ConfigError(
            "a swarm with more stages than the model has units",
            given=f"{cut.stages} stages, {len(units)} units", expected=f"1 to {len(units)} stages",
            remedy=f"stages = {len(units)}",
        )  # fmt: skip
    if not sure:
        check_chain(model, units, sample)
    if cut.cuts:
        return check_cuts(cut.cuts, units=len(units), stages=cut.stages)
    return cuts_by_size(units, stages=cut.stages)


class ModelStage:
    """One stage of a model with all that its member trains; the other stages can be freed."""

    def __init__(
        self,
        model: nn.Module,
        number: int,
        cut: StageCut,
        *,
        device: torch.device = CPU,
        sample: Tensor | None = None,
    ) -> None:
        """Take stage `number`, from 0, out of a whole model in main memory, and move it.

        Raises:
            ConfigError: the model cannot be cut like that, stages share a weight, or the precision
                needs a loss scale.
        """
        if dtype_of(cut.precision) is torch.float16:
            raise ConfigError(
                "the stages of a swarm cannot agree on the loss scale that fp16 needs",
                given='precision = "fp16"', expected="bf16 or fp32",
                remedy='precision = "bf16" in [train]',
            )  # fmt: skip
        criterion = criterion_alone(model)
        at = cuts_of(model, cut, sample=sample)
        units, names = chain_of(model)[0], names_of(model)
        stages = cut_up(units, at)
        _refuse_shared(shared(stages, names), model)
        order = {name: place for place, name in enumerate(names.values())}
        saved, rest = saved_buffers(model), untrained_state(model)
        self.number, self.cut, self.cuts = number, cut, at
        self.device = device
        self.module = Stage(stages[number], names=names, precision=cut.precision, device=device)
        self.module.to(device)
        self.criterion: Criterion | None = criterion if self.last else None
        found = self.module.trained()
        self._parameters = {name: found[name] for name in sorted(found, key=order.__getitem__)}
        self._buffers = self.module.among(saved)
        self._untrained = self.module.among(rest)

    @property
    def first(self) -> bool:
        """Whether its inputs are the data."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return self.number == self.cut.stages - 1

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in the whole model, in its order."""
        return self._parameters

    def buffers(self) -> dict[str, Tensor]:
        """Return the saved floating-point buffers by their names in the whole model."""
        return self._buffers

    def untrained(self) -> dict[str, Tensor]:
        """Return frozen parameters and saved buffers that are not floating-point, by name."""
        return self._untrained


def _refuse_shared(ties: dict[str, list[int]], model: nn.Module) -> None:
    if not ties:
        return
    name, holders = next(iter(ties.items()))
    tie = getattr(getattr(model, "config", None), "tie", None)
    raise ConfigError(
        "stages of a swarm cannot share a weight: their members meet in rounds of their own",
        given=f"{name} on stages {_numbers(holders)}", expected="every weight on one stage",
        remedy="tie = false in [model]" if tie is not None else "a model without shared weights",
    )  # fmt: skip


def _numbers(stages: Sequence[int]) -> str:
    return " and ".join(str(stage) for stage in stages)
