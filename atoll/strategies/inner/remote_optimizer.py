"""An optimizer that steps elsewhere: settings here, its state spread over the ranks.

The scale of the loss of a whole island, as its first rank saves it and sets it anew.
"""

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
    """`Task.optimizer` of an island's first rank.

    Its groups are where schedules set rates. Its state comes and goes as that of an optimizer of
    the whole model, by commands: from the thread that trains only. So a checkpoint does not say
    over which ranks the model was spread.
    """

    def __init__(
        self,
        whole: Optimizer,
        *,
        names: Mapping[str, Tensor],
        broadcaster: CommandBroadcaster,
        worker: Worker,
    ) -> None:
        """Stand for an optimizer of the host model, which never steps itself.

        Args:
            whole: That optimizer.
            names: Its parameters by name.
            broadcaster: Who has the state.
            worker: This rank's part of them.
        """
        self._whole, self._broadcaster, self._worker = whole, broadcaster, worker
        self._named = names
        self._ready = False
        super().__init__(whole.param_groups, whole.defaults)
        self._ready = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the whole model's optimizer."""
        return self._whole.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:
            self._whole.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what is trained was dealt out to the ranks.

        Raises:
            ConfigError: always, once the optimizer is there.
        """
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
        """Return the state as that of an optimizer of the whole model; it is gathered for this."""
        return self._as_whole(self._broadcaster.call(TAKE))

    def remote_state_dict(self) -> dict[str, Any]:
        """Return the same with a :class:`Far` for every large tensor; valid until the next step."""
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
        """Take up what `state_dict`, or an optimizer of the whole model, returned."""
        self._whole.load_state_dict(state_dict)
        kept = self._whole.state
        state = {name: dict(kept[p]) for name, p in self._named.items() if p in kept}
        self._whole.state.clear()
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        self._worker.offered = (state, settings)
        self._broadcaster.call(GIVE)


class RemoteScaler:
    """`Task.scaler` of an island's first rank; see :class:`atoll.task.LossScale`.

    The scalers of all ranks are equal after every step: the first one's state is that of all, and
    reading it costs nothing. Setting it is a command: from the thread that trains only.
    """

    def __init__(self, broadcaster: CommandBroadcaster, worker: Worker) -> None:
        """Stand for the scalers of all ranks; `worker` is this rank's part of them."""
        self._broadcaster, self._worker = broadcaster, worker

    def state_dict(self) -> dict[str, float]:
        """Return the scale and how long it has been good; nothing where there is no scale."""
        return self._worker.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Let all ranks take up what `state_dict` returned.

        Raises:
            ValueError: these are no numbers that a scaler has; no rank has changed then.
        """
        if state:
            scale, good_steps = checked_scale(state)
            self._broadcaster.call(SCALE, scale=scale, good_steps=good_steps)
