"""A model as a chain of units, and the pipeline stages made of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.models.causal_lm import GPT2, ROTARY, CausalLM
from atoll.strategies.inner.model_facts import criterion_of
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.cuts import as_tuple
from atoll.strategies.inner.precision import computing


def chain_of(model: nn.Module) -> tuple[list[nn.Module], bool]:
    """Return the modules that form a model's forward pass when chained.

    They are the result of `units()`, or the children of an `nn.Sequential`, recursively. For other
    models the children are a guess, in order of creation.

    Returns:
        The modules, and whether they are certain; guesses need `check_chain`.

    Raises:
        ConfigError: trained parameters of the model are in none of them.
    """
    named: Any = getattr(model, "units", None)
    flat = _flat(model)
    sure = callable(named) or flat != [model]
    if callable(named):
        units: list[nn.Module] = list(named())
    else:
        units = flat if sure else [unit for child in model.children() for unit in _flat(child)]
    held = {id(parameter) for unit in units for parameter in unit.parameters()}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if left:
        raise ConfigError(
            "a pipeline cannot cut this model: some parameters are in none of its units",
            given=f"{type(model).__name__}, {len(units)} units, without {', '.join(left[:3])}",
            expected="units() that returns modules which, chained, compute what the model does",
            remedy=f"let units() return {_owners(left)}, too",
        )
    return units, sure


def _owners(names: Sequence[str]) -> str:
    """Return the modules that own these parameters, the first three of them, for people."""
    owners = {name.rpartition(".")[0] or "a module that owns " + name: None for name in names}
    return ", ".join(list(owners)[:3])


def check_chain(model: nn.Module, units: Sequence[nn.Module], inputs: Tensor | None) -> None:
    """Check guessed units against the model's outputs for a few rows.

    Raises:
        ConfigError: the outputs differ, or there are no rows to compare.
    """
    reason = "there is no data to compare with"
    if inputs is not None:
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                reason = _difference(model, units, inputs)
        finally:
            model.train(training)
    if not reason:
        return
    raise ConfigError(
        "a pipeline cannot cut this model: its children are not applied one after the other",
        given=f"{type(model).__name__} with {len(units)} children: {reason}",
        expected="an nn.Sequential, or a method units()",
        remedy=f"name one of {', '.join(sorted({*ROTARY, GPT2}))} in [model]"
        if isinstance(model, CausalLM)
        else "give the model a method units() that returns modules which, chained, "
        "compute its forward pass",
    )


_NOT_TAKEN = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError,
)  # fmt: skip
"""What modules raise when they are given the outputs of the wrong one."""


def _difference(model: nn.Module, units: Sequence[nn.Module], inputs: Tensor) -> str:
    """Return why the chained units are not the model, naming the first that does not fit."""
    expected, values = as_tuple(model(inputs)), as_tuple(inputs)
    names = {id(module): name for name, module in model.named_modules()}
    before = "the inputs"
    for unit in units:
        name = f"{names[id(unit)]} ({type(unit).__name__})"
        try:
            values = as_tuple(unit(*values))
        except _NOT_TAKEN as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            return f"{name} does not take {before}: {reason}"
        before = f"the outputs of {name}"
    same = len(expected) == len(values) and all(map(_equal, expected, values))
    return "" if same else "the outputs differ from the model's"


def _equal(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def words_of(units: Sequence[nn.Module]) -> str:
    """Return units for people, equal ones in a row together, e.g. `Embedding, 8 Block, Linear`."""
    kinds = itertools.groupby(type(unit).__name__.lstrip("_") for unit in units)
    counted = [(kind, len(list(group))) for kind, group in kinds]
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in counted)


def _flat(module: nn.Module) -> list[nn.Module]:
    """Return the pieces of a module, through nested lists and sequences."""
    if isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    ):
        return [piece for child in module for piece in _flat(child)]
    return [module]


class Stage(nn.Module):
    """Some units of a model, chained."""

    def __init__(
        self,
        units: Sequence[nn.Module],
        *,
        names: Mapping[int, str],
        precision: str,
        device: torch.device,
        receives: Activations | None = None,
        sends: Activations | None = None,
    ) -> None:
        """Create a stage; `names` are the whole model's, for parameters and buffers, by `id`.

        `receives` and `sends` pack what it exchanges with its neighbours, if it has them.
        """
        super().__init__()
        self._receives, self._sends = receives, sends
        self.chain = nn.ModuleList(units)
        self._precision, self._device = precision, device
        own = (*self.named_parameters(remove_duplicate=False), *self.named_buffers())
        self._names = {local: names[id(tensor)] for local, tensor in own if id(tensor) in names}

    def forward(self, *values: Tensor) -> Any:
        """Return the outputs of the last unit, packed."""
        if self._receives is not None:
            values = self._receives.unpack(values)
        with computing(self._precision, self._device):
            for unit in self.chain:
                values = as_tuple(unit(*values))
        if self._sends is not None:
            values = self._sends.pack(values)
        outputs = tuple(value.contiguous() for value in values)  # sends need contiguous tensors
        return outputs[0] if len(outputs) == 1 else outputs

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in the whole model."""
        own = self.named_parameters()
        return {self._names[local]: p for local, p in own if p.requires_grad}

    def among(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the parameters and buffers with a whole-model name in `names`."""
        own = (*self.named_parameters(), *self.named_buffers())
        named = ((self._names.get(local, ""), tensor) for local, tensor in own)
        return {name: tensor for name, tensor in named if name in names}


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of every parameter and buffer by `id`; shared ones have their first name."""
    return {
        id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def cut_up(units: Sequence[nn.Module], cuts: Sequence[int]) -> list[list[nn.Module]]:
    """Return the units of each stage."""
    edges = [0, *cuts, len(units)]
    return [list(units[a:b]) for a, b in itertools.pairwise(edges)]


def shared(stages: Sequence[Sequence[nn.Module]], names: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the trained parameters that several stages hold, and these stages."""
    found: dict[str, list[int]] = {}
    for number, units in enumerate(stages):
        own = {id(p) for unit in units for p in unit.parameters() if p.requires_grad}
        for key in own:
            found.setdefault(names[key], []).append(number)
    return {name: found[name] for name in names.values() if len(found.get(name, ())) > 1}


def criterion_alone(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return a model's `criterion` without its parameters, which can then be freed."""
    hollow = copy.copy(model)
    bare = {
        name: child
        for name, child in model.named_children()
        if next(child.parameters(), None) is None
    }
    kept = {name: value for name, value in vars(model).items() if not _holds_modules(value)}
    kept |= {"_parameters": {}, "_modules": bare, "_buffers": dict(model._buffers)}
    hollow.__dict__ = kept
    return criterion_of(hollow)


def _holds_modules(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, nn.Module) for item in value)
