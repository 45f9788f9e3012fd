"""One stage of a model, cut in one process without torch.distributed.

Members of a SWARM cut the same model at the same places without asking each other, so the cuts MUST
follow from the model and the job alone: from the job's `cuts`, else from the numbers of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.strategies.inner.model_facts import (
    Criterion,
    hidden_matrices,
    saved_buffers,
    untrained_state,
)
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.cuts import check_cuts, cuts_by_size, trained_units
from atoll.strategies.inner.pipeline.stages import (
    Stage,
    chain_of,
    check_chain,
    criterion_alone,
    cut_up,
    names_of,
    shared,
    words_of,
)
from atoll.strategies.inner.pipeline.subspace import (
    SEED,
    Constraint,
    Subspace,
    TokenBoundary,
    check_confined,
)
from atoll.strategies.inner.precision import dtype_of

CPU = torch.device("cpu")
ONE_STAGE = "stages = 1 in [swarm]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """How a job cuts its model."""

    stages: int
    cuts: tuple[int, ...] = ()
    """Units before which to cut; empty: by the number of weights."""
    precision: str = "fp32"
    parts: str = "stages"
    """The word for the parts in messages: `stages` of a SWARM, or `levels` of modules."""
    size: int = 0
    """Dimensions of the subspace in which activations are sent; 0: whole."""


def cuts_of(
    model: nn.Module, cut: StageCut, *, sample: Tensor | None = None, tried: bool = True
) -> tuple[int, ...]:
    """Return the units before which to cut a model, the same on every member.

    `sample` are a few rows of inputs, with which units are `tried` that are a guess.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    units, sure = chain_of(model)
    most = len(trained_units(units))
    if not 1 <= cut.stages <= most:
        levels = cut.parts == "levels"
        raise ConfigError(
            f"{'a model' if levels else 'a swarm'} with more {cut.parts} than the model has units "
            "with weights",
            given=f"{cut.stages} {cut.parts}, {most} such units ({words_of(units)})",
            expected=f"1 to {most} {cut.parts}",
            remedy=f"{most} numbers in modules of [dipaco], or fewer" if levels
            else f"stages = {most} in [swarm]",
        )  # fmt: skip
    if not sure and tried:
        check_chain(model, units, sample)
    if cut.cuts:
        return check_cuts(cut.cuts, units=len(units), stages=cut.stages, table="swarm")
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
            ConfigError: the model cannot be cut or confined like that, stages share a weight, or
                the precision needs a loss scale.
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
        refuse_shared(stages, model, parts=cut.parts)
        order = {name: place for place, name in enumerate(names.values())}
        saved, rest = saved_buffers(model), untrained_state(model)
        hidden = {names[id(parameter)] for parameter in hidden_matrices(model)}
        self.number, self.cut, self.cuts = number, cut, at
        self.device = device
        self._activations = Activations(ActivationFormat())
        own = stages[number]
        self._constraint = self._confine(model, own, names) if cut.size else None
        self.module = Stage(
            own, names=names, precision=cut.precision, device=device,
            receives=None if self.first else self._activations,
            sends=None if self.last else self._activations,
        )  # fmt: skip
        self.module.to(device)
        self.criterion: Criterion | None = criterion if self.last else None
        found = self.module.trained()
        self._parameters = {name: found[name] for name in sorted(found, key=order.__getitem__)}
        self.hidden = [p for name, p in self._parameters.items() if name in hidden]
        """Its trained matrices that are neither embeddings nor the output layer of the model."""
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
        """Return the saved inexact buffers by their names in the whole model."""
        return self._buffers

    def untrained(self) -> dict[str, Tensor]:
        """Return frozen parameters and saved buffers that are not inexact, by name."""
        return self._untrained

    # ------------------------------------------------------------------------ subspace

    def enter(self, tokens: Tensor) -> None:
        """Set the model's inputs of the next pass, by which activations are packed.

        Every member of a SWARM can compute them, so they are not sent.
        """
        if self.cut.size:
            self._activations.begin([tokens.to(self.device)])
            self._activations.enter(0)

    def constrain(self) -> None:
        """Project loaded weights into the subspace, if they are outside."""
        if self._constraint is not None:
            self._constraint.settle()

    def constrain_gradients(self) -> None:
        """Drop what gradients would change against the subspace."""
        if self._constraint is not None:
            self._constraint.project_gradients()

    def stepping(self) -> AbstractContextManager[None]:
        """Surround an optimizer's step; see :meth:`Constraint.in_coordinates`."""
        return nullcontext() if self._constraint is None else self._constraint.in_coordinates()

    def _confine(
        self, model: nn.Module, own: Sequence[nn.Module], names: Mapping[int, str]
    ) -> Constraint:
        """Confine this stage like all others: everything follows from the initial weights."""
        stream = check_confined(model, self.cut.size)
        embedding = model.get_parameter(f"{stream.embedding}.weight").detach()
        drawn = Subspace.drawn(embedding.shape[1], self.cut.size, seed=SEED)
        table = drawn.outside(embedding).to(self.device)
        subspace = Subspace(drawn.basis.to(table))
        self._activations.boundary = TokenBoundary(subspace, table)
        found = {names[id(p)]: p for unit in own for p in unit.parameters() if p.requires_grad}
        constraint = Constraint.of({} if self.last else found, stream, subspace, table)
        for unit in own:  # before the constraint holds on to tensors in main memory
            unit.to(self.device)
        constraint.project()
        return constraint


def refuse_shared(
    stages: Sequence[Sequence[nn.Module]], model: nn.Module, *, parts: str = "stages"
) -> None:
    """Raise ConfigError if stages, each a list of units of the model, share a weight.

    `parts` is the word for them in messages, see `StageCut`.
    """
    ties = shared(stages, names_of(model))
    if not ties:
        return
    name, holders = next(iter(ties.items()))
    levels = parts == "levels"
    options = getattr(model, "config", None)
    remedy = "a model without shared weights"
    if getattr(options, "tie", None) is not None:
        remedy = "tie = false in [model]"
    elif getattr(options, "config", None):  # of transformers, described in the job
        remedy = "tie_word_embeddings = false in [model.config]"
    what = "levels of a model with paths" if levels else "stages of a swarm"
    raise ConfigError(
        f"{what} cannot share a weight: each is averaged in rounds of its own",
        given=f"{name} on {parts} {_numbers(holders)}",
        expected=f"every weight on one {parts[:-1]}",
        remedy=f"{remedy}, or {'one level in modules of [dipaco]' if levels else ONE_STAGE}",
    )  # fmt: skip


def _numbers(stages: Sequence[int]) -> str:
    return " and ".join(str(stage) for stage in stages)
