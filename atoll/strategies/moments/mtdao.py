"""MT-DAO: Local Adam with a second, slow momentum that outlasts a round.

Iacob et al. 2025, "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates"
(https://arxiv.org/abs/2510.05361), Algorithm 1. Legend: m and v Adam's moments, u the slow
momentum, beta = `slow_beta`, omega = `slow_weight`, g the clipped gradient, t the number of the
step, a hat divides by 1 - beta^t as in Adam.

    u = beta u + (1 - beta) g
    x = x - lr [(1 - omega) m^ + omega u^] / (sqrt(v^) + eps)
    x, m, v and u are averaged each at its own period, as in DES-LOC

Adam's beta of 0.9 keeps 3 % of a direction over 32 steps: what members agreed on is forgotten
within a round. A beta of 0.995 keeps 85 %.

Differs from the paper:
  * the fast part is Adam's own first moment, where the paper has the gradient itself, so that
    omega = 0 is DES-LOC bit for bit, and with equal periods Local Adam;
  * u has Adam's bias correction: a run starts as Adam does;
  * Adam with weight decay as the inner optimizer has it, instead of ADOPT.
"""

from __future__ import annotations

from typing import Any

import torch

from atoll.codec.base import Codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.local_moments import MTDAO
from atoll.strategies.moments.desloc import MEAN, VARIANCE, DesLocOuter
from atoll.task import Task

SLOW = "slow_momentum"
"""Key of the slow momentum in the inner optimizer's state, so that checkpoints contain it."""


class MTDAOOuter(DesLocOuter):
    """Adds a slow momentum to Adam's steps; see the module's docstring."""

    options: MTDAO

    def __init__(self, options: MTDAO) -> None:
        """Check the options."""
        super().__init__(options)
        if not 0 <= options.slow_beta < 1 or not 0 <= options.slow_weight <= 1:
            raise ConfigError(
                "the slow momentum cannot work with these numbers",
                given=f"slow_beta = {options.slow_beta}, slow_weight = {options.slow_weight}",
                expected="slow_beta of 0 up to below 1, slow_weight of 0 to 1",
            )
        if options.slow_rounds < 0:
            raise ConfigError(
                "slow_rounds is too small", given=options.slow_rounds, expected="0 or more"
            )
        self._attached: torch.optim.Optimizer | None = None

    def periods(self) -> dict[str, int]:
        """Return how many rounds lie between two averages of each moment; 0: none."""
        slow = {SLOW: self.options.slow_rounds} if self.options.slow_weight else {}
        return super().periods() | slow

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state, and follow the optimizer's steps."""
        super().setup(task, group=group, codec=codec)
        if self.options.slow_weight and self._attached is not task.optimizer:
            task.optimizer.register_step_post_hook(self._turn)
            self._attached = task.optimizer

    @torch.no_grad()
    def _turn(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Replace a share of Adam's step by the slow momentum's."""
        beta, omega = self.options.slow_beta, self.options.slow_weight
        for group in optimizer.param_groups:
            beta1, beta2 = (float(each) for each in group["betas"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                if SLOW not in state:
                    state[SLOW] = torch.zeros_like(parameter)
                state[SLOW].lerp_(parameter.grad, 1 - beta)
                steps = float(state["step"])
                turned = state[SLOW] / (1 - beta**steps)
                turned.sub_(state[MEAN], alpha=1 / (1 - beta1**steps))
                root = (state[VARIANCE] / (1 - beta2**steps)).sqrt_().add_(float(group["eps"]))
                parameter.addcdiv_(turned, root, value=-float(group["lr"]) * omega)
