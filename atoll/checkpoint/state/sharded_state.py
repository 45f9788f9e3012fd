"""A model and its optimizer as named tensors, of which a rank may hold only a piece.

    model/<parameter or buffer>         optimizer/<parameter>/<exp_avg, step, ...>

Names are those of the unwrapped model, so they are the same on any mesh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.errors import CheckpointError

OPTIMIZER_PREFIX = "optimizer/"
KIND = "optimizer"
"""Key in a file's metadata: class of the optimizer."""
GROUPS = "groups"
"""Key in a file's metadata: JSON, options of the optimizer by the parameter's name."""

WRAPPINGS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that wrappers add."""


class ShardedState(Protocol):
    """A rank's part of a model, as inner strategies provide it."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters on this rank, by their name in the whole model."""
        ...

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the saved buffers on this rank."""
        ...


@runtime_checkable
class WithUntrainedState(Protocol):
    """A rank's part that includes untrained state."""

    def untrained(self) -> Mapping[str, Tensor]:
        """Return the frozen parameters and further saved buffers on this rank."""
        ...


class Trained:
    """A rank's piece of a model and its optimizer."""

    def __init__(
        self,
        model: nn.Module | ShardedState,
        optimizer: Optimizer | None,
        *,
        steps_on: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Name the tensors of a model and its optimizer.

        Args:
            model: Wrapped or not, with parameters that may be DTensors; or a rank's part of one.
            optimizer: Over its parameters; None: only the model is saved or loaded.
            steps_on: Tensors by which the optimizer knows parameters, where these are others: a
                plain tensor for this rank's piece of a DTensor.
        """
        self.optimizer = optimizer
        self.ties: dict[str, str] = {}
        """Second names of tensors -> the name under which they are saved."""
        if isinstance(model, nn.Module):
            self.parameters = {plain(name): p for name, p in model.named_parameters()}
            self.buffers = _saved_buffers(model)
            self.ties = ties_of(model)
        else:
            self.parameters = dict(model.parameters())
            self.buffers = dict(model.buffers())
            if isinstance(model, WithUntrainedState):
                self.buffers |= model.untrained()
        self._known = dict(steps_on) if steps_on is not None else dict(self.parameters)
        self._names = {id(tensor): name for name, tensor in self._known.items()}

    def model_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers."""
        held = {**self.parameters, **self.buffers}
        return {MODEL_PREFIX + name: tensor.detach() for name, tensor in held.items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state.

        Raises:
            CheckpointError: it trains what is not in the model.
        """
        if self.optimizer is None:
            return {}
        found: dict[str, Tensor] = {}
        for parameter, state in self.optimizer.state.items():
            if id(parameter) not in self._names:
                raise CheckpointError(
                    "the optimizer trains a tensor that is not in the model",
                    given=f"shape {tuple(parameter.shape)}",
                    remedy="build it over the parameters of the model as it is now",
                )
            name = self._names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, bool | int | float):
                    value = torch.tensor(value, dtype=torch.float64)
                if isinstance(value, Tensor):
                    piece = _as_piece(value.detach(), of=self.parameters[name], known=parameter)
                    found[f"{OPTIMIZER_PREFIX}{name}/{key}"] = piece
        return found

    def texts(self) -> dict[str, str]:
        """Return what is saved of the optimizer beside tensors."""
        if self.optimizer is None:
            return {}
        groups = [
            {
                "names": [self._names[id(p)] for p in group["params"]],
                "options": _plain_options(group),
            }
            for group in self.optimizer.param_groups
        ]
        return {KIND: kind_of(self.optimizer), GROUPS: json.dumps(groups)}

    def room_for(
        self, cuts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, Tensor]:
        """Return tensors for the optimizer's state that a checkpoint has of these parameters.

        Args:
            cuts: Size and type of every tensor in the checkpoint.

        Raises:
            CheckpointError: some state has a form that cannot be split among ranks.
        """
        found: dict[str, Tensor] = {}
        if self.optimizer is None:
            return found
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for full, (size, dtype) in cuts.items():
            name, _, _ = full.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            parameter = self.parameters.get(name)
            if not full.startswith(OPTIMIZER_PREFIX) or parameter is None:
                continue
            if id(self._known.get(name)) not in trained:
                continue
            if tuple(parameter.shape) == size:
                found[full] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            elif size == () or type(parameter.data) is Tensor:
                found[full] = torch.zeros(size, dtype=dtype)
            else:
                raise CheckpointError(
                    "this optimizer's state cannot be split among ranks",
                    given=f"{full} of shape {size}",
                    expected=f"a number, or the parameter's shape {tuple(parameter.shape)}",
                )
        return found

    def take_up(self, tensors: Mapping[str, Tensor], texts: Sequence[Mapping[str, str]]) -> None:
        """Give the optimizer its state.

        Args:
            tensors: What `room_for` returned, filled.
            texts: What `texts` returned on the ranks that saved.
        """
        if self.optimizer is None:
            return
        states: dict[str, dict[str, Any]] = {}
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            if is_spread(tensor) and not is_spread(self._known[name]):
                local: Any = tensor
                tensor = local.to_local()
            states.setdefault(name, {})[key] = tensor
        options = {
            name: group["options"]
            for metadata in texts
            for group in json.loads(metadata.get(GROUPS, "[]"))
            for name in group["names"]
        }
        names = self._names
        ready = self.optimizer.state_dict()
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        ready["state"] = {i: states[name] for i, name in enumerate(order) if name in states}
        for group in ready["param_groups"]:
            saved = options.get(order[group["params"][0]], {}) if group["params"] else {}
            for key, value in saved.items():
                if key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
        self.optimizer.load_state_dict(ready)


def is_spread(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, without importing the module that defines them."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _as_piece(value: Tensor, *, of: Tensor, known: Tensor) -> Tensor:
    """Return the state of a piece as a DTensor with the mesh and placements of its parameter."""
    if not is_spread(of) or is_spread(known) or value.shape != known.shape:
        return value
    from torch.distributed.tensor import DTensor

    spread: Any = of
    return DTensor.from_local(
        value, spread.device_mesh, spread.placements, run_check=False, shape=of.shape,
        stride=of.stride(),
    )  # fmt: skip


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or what a stand-in for others has as `kind`."""
    return str(getattr(optimizer, "kind", type(optimizer).__name__))


def plain(name: str) -> str:
    """Return a name without what wrappers put into it."""
    for wrapping in WRAPPINGS:
        name = name.replace("." + wrapping, ".").removeprefix(wrapping)
    return name


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the second names of tensors that a model has under several.

    A reader that loads weights by `load_state_dict` expects all of them.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    names = {id(p): plain(name) for name, p in model.named_parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = names.get(id(tensor)) or first.setdefault(id(tensor), plain(name))
        if known != plain(name):
            ties[plain(name)] = known
    return ties


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are in the model's state."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    found = model.named_buffers()
    return {plain(name): buffer for name, buffer in found if id(buffer) in saved}


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are numbers and words."""
    kinds = bool | int | float | str | None
    return {
        key: value
        for key, value in group.items()
        if key != "params"
        and all(isinstance(one, kinds) for one in (value if isinstance(value, tuple) else [value]))
    }
