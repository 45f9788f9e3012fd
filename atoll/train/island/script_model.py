"""A script's own model, distributed over the ranks by the script, and its host model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.strategies.inner.gather_scatter import Subgroups, Transport
from atoll.strategies.inner.host_model import PULL, PUSH
from atoll.strategies.inner.sharded_optimizer import OptimizerState, State, remote_state
from atoll.strategies.wrapped_optimizer import WrapSpec

TAKE, GIVE = "take the optimizer", "give the optimizer"
OUTLINE, FETCH = "outline the optimizer", "fetch from the optimizer"
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attribute names by which wrappers hold their module; they are removed from parameter names."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers (DDP, compilation, recomputation)."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
            continue
        inner = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def host_model_of(module: nn.Module, *, known: dict[int, Any] | None = None) -> nn.Module:
    """Return modules without behaviour that hold a model's whole parameters in main memory.

    Names, order, dtypes and shared parameters are those of the model without wrappers.
    """
    known = {} if known is None else known
    module = unwrapped(module)
    if id(module) in known:
        return known[id(module)]  # type: ignore[no-any-return]
    made = known[id(module)] = nn.Module()
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in known:
            blank = torch.zeros(parameter.shape, dtype=parameter.dtype)
            known[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
        made.register_parameter(name, None if parameter is None else known[id(parameter)])
    for name, buffer in module._buffers.items():
        blank_buffer = None
        if buffer is not None:
            blank_buffer = torch.zeros(buffer.shape, dtype=buffer.dtype)
        kept = name not in module._non_persistent_buffers_set
        made.register_buffer(name, blank_buffer, persistent=kept)
    for name, child in module._modules.items():
        made.add_module(name, None if child is None else host_model_of(child, known=known))
    return made


class RankModel:
    """One rank's shards of a script's model; every rank makes one at the same time.

    Rank 0 also has the whole model, in `host_model`. Commands copy it from and to the ranks;
    see :class:`atoll.task.HeldElsewhere`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        broadcaster: CommandBroadcaster,
        device: torch.device,
    ) -> None:
        """Inspect a model that is already sharded; collective.

        Raises:
            ConfigError: its shards do not show the whole tensors, or a rank lacks a shard of one.
        """
        _check(model)
        self._model, self._broadcaster = model, broadcaster
        self.reshard()  # else gathered copies would be taken for the parameters
        plain = unwrapped(model)
        self._names = {id(p): _plain(name) for name, p in plain.named_parameters()}
        parameters = {_plain(name): p for name, p in plain.named_parameters()}
        saved = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        buffers = {_plain(n): b for n, b in plain.named_buffers() if id(b) in saved}
        _check_alike([*parameters, *buffers], broadcaster=broadcaster)
        subgroups = Subgroups()
        self._transport = Transport({**parameters, **buffers}, device=device, subgroups=subgroups)
        self._optimizer_state = OptimizerState(
            optimizer, parameters, device=device, subgroups=subgroups
        )
        self.host_model: nn.Module | None = host_model_of(model) if broadcaster.leads else None
        self._entries: Mapping[str, Tensor] | None = None
        if self.host_model is not None:
            self._entries = {
                **dict(self.host_model.named_parameters()),
                **dict(self.host_model.named_buffers()),
            }
        self.offered: tuple[State, Sequence[Mapping[str, Any]]] | None = None
        """On the first rank: a state of the optimizer that all ranks will load."""
        for verb, do in (
            (PULL, self._pull),
            (PUSH, self._push),
            (TAKE, self._take),
            (OUTLINE, self._optimizer_state.outline),
            (FETCH, self._optimizer_state.fetch),
            (GIVE, self._give),
        ):
            broadcaster.on(verb, do)
        self._pull()

    @property
    def whole(self) -> nn.Module:
        """The host model, on the first rank.

        Raises:
            ConfigError: this is another rank.
        """
        if self.host_model is None:
            raise ConfigError("only the first rank of an island has the whole model")
        return self.host_model

    def has(self, model: nn.Module) -> bool:
        """Return whether `model` is this model, with or without its wrappers."""
        return unwrapped(model) is unwrapped(self._model)

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name in the whole model.

        Raises:
            ConfigError: the parameter is not part of the model.
        """
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                "the optimizer steps a parameter that is not the model's",
                given=f"one of shape {tuple(parameter.shape)}",
                remedy="make the optimizer after the model was spread (fully_shard, ...)",
            )
        return name

    def reshard(self) -> None:
        """Free gathered copies of parameters; the next forward pass gathers them again."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _pull(self) -> None:
        for name, whole in self._transport.gather():
            if self._entries is not None:
                self._entries[name].detach().copy_(whole)

    def _push(self) -> None:
        self.reshard()
        self._transport.deal(self._entries)

    def _take(self) -> dict[str, dict[str, Tensor]]:
        return self._optimizer_state.gather()

    def _give(self) -> None:
        state, groups = self.offered if self.offered is not None else (None, None)
        self._optimizer_state.deal(state, groups)
        self.offered = None


class ScriptOptimizer(WrapSpec):
    """`Task.optimizer` of a script's first rank: own parameter groups, the state of all ranks.

    State is read and loaded in the form of an optimizer of the whole model, by commands to all
    ranks: use it from the training thread only.
    """

    def __init__(
        self, inner: Optimizer, *, model: RankModel, broadcaster: CommandBroadcaster
    ) -> None:
        super().__init__(inner)
        self._model, self._broadcaster = model, broadcaster
        entries = dict(model.whole.named_parameters())
        groups = [
            {**_settings(g), "params": [entries[model.name_of(p)] for p in g["params"]]}
            for g in inner.param_groups
        ]
        self._names = {id(p): name for name, p in entries.items()}
        self._whole = Optimizer(groups, inner.defaults)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as that of an optimizer of the whole model; it is gathered for this."""
        return self._as_whole(self._broadcaster.call(TAKE))

    def remote_state_dict(self) -> dict[str, Any]:
        """Return the same with a :class:`RemoteState` for large tensors; until the next step."""
        fetch = partial(self._broadcaster.call, FETCH)
        return self._as_whole(remote_state(self._broadcaster.call(OUTLINE), fetch=fetch))

    def _as_whole(self, found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        for own, group in zip(self._whole.param_groups, self.inner.param_groups, strict=True):
            own.update(_settings(group))
        for group in self._whole.param_groups:
            for parameter in group["params"]:
                if self._names[id(parameter)] in found:
                    self._whole.state[parameter] = found[self._names[id(parameter)]]
        state = self._whole.state_dict()
        self._whole.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the whole model."""
        self._whole.load_state_dict(state_dict)
        state = {self._names[id(p)]: dict(own) for p, own in self._whole.state.items()}
        self._whole.state.clear()
        self._model.offered = (state, [_settings(group) for group in self._whole.param_groups])
        self._broadcaster.call(GIVE)


def saved_model(wrapped: RankModel | None, model: nn.Module) -> RankModel:
    """Return the wrapped model, the only one that an island can save.

    Raises:
        ConfigError: `model` is another one.
    """
    if wrapped is None or not wrapped.has(model):
        raise ConfigError(
            "the ranks of an island can only save the model that was wrapped",
            given=type(model).__name__,
            expected="the first argument of run.wrap",
        )
    return wrapped


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(name: str) -> str:
    """Return a name without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _check(model: nn.Module) -> None:
    """Refuse a model with shards that do not state their place in the whole tensor.

    Raises:
        ConfigError: it uses FSDP 1, which hides parameters in flat vectors.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "FullyShardedDataParallel hides a model's parameters in flat vectors",
            given=type(model).__name__,
            expected="fully_shard, which shows them as DTensors",
            remedy='torch.distributed.fsdp.fully_shard(module, mesh=run.mesh["shard"])',
        )


def _check_alike(names: Sequence[str], *, broadcaster: CommandBroadcaster) -> None:
    """Refuse a model of which ranks have different parameters; the same error on every rank.

    Raises:
        ConfigError: the parameters differ.
    """
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
    rows = broadcaster.gather(torch.tensor([int.from_bytes(digest), len(names)]))
    if len({tuple(row) for row in rows.tolist()}) > 1:
        raise ConfigError(
            "the ranks of an island have different parameters",
            given=f"{', '.join(str(int(row[1])) for row in rows)} tensors on ranks 0, 1, ...",
            expected="the same model on every rank, each with a part of every tensor",
            remedy="for a pipeline use the built-in trainer, which divides models into stages",
        )
