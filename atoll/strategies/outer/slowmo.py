"""SlowMo: local steps and averaging, with a slow momentum over the averages.

Wang et al. 2019, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum"
(https://arxiv.org/abs/1910.00643), Algorithm 1 with Local SGD as the base. Legend: x_0 the common
parameters, x_H the mean of the members' after H steps, gamma the inner rate, alpha the slow rate,
beta the slow momentum.

    u   = beta u + (x_0 - x_H) / gamma
    x_0 = x_0 - alpha gamma u

With alpha = 1 and beta = 0 it is Local SGD. With a constant rate it is DiLoCo with heavy ball.

Differs from the paper:
  * what is kept is gamma u, so that with a constant rate nothing is divided by a small number; when
    the rate changes from one round to the next it is scaled by their ratio, which is the same;
  * gamma is the rate of the optimizer's first group at the time of the round; it MUST be the same
    on every member, unless `rate` names it. Where it is 0 the members average plainly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.periodic import SlowMo
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.task import Task


class SlowMoOuter(PeriodicOuter):
    """See the module's docstring."""

    def __init__(self, options: SlowMo) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if options.every < 1:
            raise ConfigError("every is too small", given=options.every, expected="1 or more")
        if not options.slow_lr > 0 or not 0 <= options.slow_momentum < 1 or options.rate < 0:
            raise ConfigError(
                "the slow momentum cannot work with these numbers",
                given=f"slow_lr = {options.slow_lr}, slow_momentum = {options.slow_momentum}, "
                f"rate = {options.rate}",
                expected="slow_lr above 0, slow_momentum of 0 up to below 1, rate not below 0",
            )
        self.options = options
        self._moved: Tensor | None = None
        """gamma u after the last round."""
        self._gamma = 0.0
        """The inner rate of that round."""

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state."""
        super().setup(task, group=group, codec=codec)
        self._inner = task.optimizer

    def next_due(self, step: int) -> int:
        """Return the next multiple of `every`."""
        return (step // self.options.every + 1) * self.options.every

    def is_plain(self, step: int) -> bool:
        """Return whether the mean is taken as it is."""
        return self.options.slow_lr == 1.0 and self.options.slow_momentum == 0.0

    @property
    def _rate(self) -> float:
        """The inner rate now."""
        return self.options.rate or float(self._inner.param_groups[0]["lr"])

    @torch.no_grad()
    def update(self, start: Tensor, mean: Tensor, *, step: int) -> None:
        """Take a slow-momentum step."""
        gamma, momentum = self._rate, self.options.slow_momentum
        if gamma <= 0.0:
            start.sub_(mean)
            return
        if momentum:
            if self._moved is None:
                self._moved = mean.clone()
            else:
                self._moved.mul_(momentum * (gamma / self._gamma)).add_(mean)
            self._gamma, mean = gamma, self._moved
        start.sub_(mean, alpha=self.options.slow_lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common state with the slow momentum."""
        state = super().state_dict()
        if self._moved is not None:
            state["shared.outer.moved"] = self._moved
            state["shared.outer.rate"] = torch.tensor(self._gamma, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        moved = state.get("shared.outer.moved")
        self._moved = None if moved is None else moved.clone()
        self._gamma = 0.0 if moved is None else float(state["shared.outer.rate"])
