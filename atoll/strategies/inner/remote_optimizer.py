"""Rank 0's view of the optimizer and loss scaler that run on all ranks of an island."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.strategies.inner.precision import checked_scale
from atoll.strategies.inner.sharded_optimizer import remote_state
from atoll.strategies.inner.worker import FETCH, GIVE, OUTLINE, SCALE, TAKE, Worker


class RemoteOptimizer(Optimizer):
    """`Task.optimizer` of an island's rank 0.

    Schedules set the rates of its groups. Its state is exchanged, from the training thread only, as
    that of an optimizer of the whole model, so that a checkpoint does not depend on the mesh.
    """

    def __init__(
        self,
        whole: Optimizer,
        *,
        names: Mapping[str, Tensor],
        broadcaster: CommandBroadcaster,
        worker: Worker,
    ) -> None:
        """Represent the ranks' optimizers by `whole`, that of the host model, which never steps."""
        self._whole, self._broadcaster, self._worker = whole, broadcaster, worker
        self._named = names
        self._ready = False
        super().__init__(whole.param_groups, whole.defaults)
        self._ready = True

    @property
    def kind(self) -> str:
        """Name of the class of the ranks' optimizers."""
        return type(self._whole).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the whole model's optimizer."""
        return self._whole.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:
            self._whole.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError: the parameters are already spread over the ranks."""
        if self._ready:
            raise ConfigError(
                "parameters cannot be added to what an island trains",
                remedy="add them to the model",
            )

    def step(self, closure: Any = None) -> Any:
        """Do nothing: the ranks step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients here."""

    def state_dict(self) -> dict[str, Any]:
        """Gather and return the state as that of an optimizer of the whole model."""
        return self._as_whole(self._broadcaster.call(TAKE))

    def remote_state_dict(self) -> dict[str, Any]:
        """Return the same with :class:`RemoteState` for large tensors, valid for one step."""
        fetch = partial(self._broadcaster.call, FETCH)
        return self._as_whole(remote_state(self._broadcaster.call(OUTLINE), fetch=fetch))

    def _as_whole(self, found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        self._whole.state.clear()
        for name, own in found.items():
            self._whole.state[self._named[name]] = own
        state = self._whole.state_dict()
        self._whole.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of one of the whole model."""
        self._whole.load_state_dict(state_dict)
        kept = self._whole.state
        state = {name: dict(kept[p]) for name, p in self._named.items() if p in kept}
        self._whole.state.clear()
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        self._worker.offered = (state, settings)
        self._broadcaster.call(GIVE)


class RemoteScaler:
    """`Task.scaler` of an island's rank 0; see :class:`atoll.task.LossScale`.

    The scalers of all ranks are equal after every step, so reading needs no communication. Setting
    is a command, from the training thread only.
    """

    def __init__(self, broadcaster: CommandBroadcaster, worker: Worker) -> None:
        self._broadcaster, self._worker = broadcaster, worker

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its good steps; empty without a scale."""
        return self._worker.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load a state on all ranks; raises ValueError, before any change, if it is invalid."""
        if state:
            scale, good_steps = checked_scale(state)
            self._broadcaster.call(SCALE, scale=scale, good_steps=good_steps)
