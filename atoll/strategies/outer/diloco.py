"""DiLoCo: many local steps, then one outer step of SGD with Nesterov momentum on the mean change.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"
(https://arxiv.org/abs/2311.08105), Algorithm 1. Legend: theta the common parameters, theta_i those
of member i, Delta_i its pseudo-gradient, w_i its weight, H = `every`.

    every member: H inner steps (AdamW) from theta on its own shard
    Delta_i = theta - theta_i
    theta   = Outer(theta, sum_i w_i Delta_i / sum_i w_i)

The paper's ablations are options: other outer optimizers (plain SGD with rate 1 is federated
averaging), dropped updates (`drop`: the member keeps its own parameters and has weight 0 in that
round), and pruned updates (`prune`). AdamW's moments are never averaged: the paper found no benefit
at three times the bytes.

Differs from the paper:
  * contributions weigh by the tokens they were trained on, unless `weight = "equal"`;
  * instead of long ordinary training beforehand, the run itself may start warm: in the first
    `shared_steps` all members compute on the same data and send nothing, then for `warmup_steps`
    they average plainly every `warmup_every` steps (post-local SGD);
  * what remains after the last full round is agreed on in a shorter one;
  * the last round of a run loses no updates, so that all end with one model;
  * floating-point buffers are averaged plainly.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from atoll.errors import ConfigError
from atoll.methods.periodic import DiLoCo
from atoll.strategies.outer.outer_optimizers import make_outer_optimizer
from atoll.strategies.outer.periodic import PeriodicOuter
from atoll.strategies.vectors.masks import check_probability, check_share, lost_updates, prune
from atoll.wire.messages import RoundPlan


class DiLoCoOuter(PeriodicOuter):
    """Local steps and an outer optimizer; see the module's docstring."""

    def __init__(self, options: DiLoCo) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        least = {"every": 1, "shared_steps": 0, "warmup_steps": 0, "warmup_every": 1}
        for name, smallest in least.items():
            if getattr(options, name) < smallest:
                raise ConfigError(
                    f"{name} is too small",
                    given=getattr(options, name),
                    expected=f"{smallest} or more",
                )
        self.options = options
        self.shared_steps = options.shared_steps
        self._warm_until = options.shared_steps + options.warmup_steps
        self._optimizer = make_outer_optimizer(
            options.outer_optimizer, lr=options.outer_lr, momentum=options.outer_momentum,
            eps=options.outer_eps, options=options.outer_options,
        )  # fmt: skip
        # A member whose update is dropped keeps its own parameters, so models differ between
        # rounds.
        self._drop, self._prune = check_probability(options.drop), check_share(options.prune)
        self.one_model = not self._drop

    def next_due(self, step: int) -> int:
        """Return the end of the shared start, of a warm-up interval or of the next H steps."""
        if step < self.shared_steps:
            return self.shared_steps
        if step < self._warm_until:
            every, since = self.options.warmup_every, self.shared_steps
            return min(since + ((step - since) // every + 1) * every, self._warm_until)
        every, since = self.options.every, self._warm_until
        return since + ((step - since) // every + 1) * every

    def is_regular(self, step: int) -> bool:
        """Return whether the start is over."""
        return step >= self._warm_until

    def is_plain(self, step: int) -> bool:
        """Return whether this round only averages: in the warm-up, or with plain SGD of rate 1."""
        # A pruned mean lacks values, so it is never a plain mean.
        plain = step <= self._warm_until or self._optimizer.is_plain
        return plain and not self._prune

    def prepare(self, delta: Tensor) -> None:
        """Prune this member's pseudo-gradient."""
        if self._prune:
            prune(self._flat.views(delta)[: self._num_trained], self._prune)

    def weight_in(self, plan: RoundPlan, weight: float, *, last: bool) -> float:
        """Return weight 0 for a dropped update."""
        return weight if self.takes_over(plan, last=last) else 0.0

    def takes_over(self, plan: RoundPlan, *, last: bool) -> bool:
        """Return whether this member's update counts; the last round drops none."""
        if last or not self._drop:
            return True
        # Drawn from a common seed: all members know which updates are dropped, without a message.
        lost = lost_updates(
            plan.members, round_=plan.round, probability=self._drop, seed=self.options.drop_seed
        )
        return self._round_client.group.me not in lost

    def update(self, start: Tensor, mean: Tensor, *, step: int) -> None:
        """Average during the warm-up, then take an outer step."""
        if step <= self._warm_until:
            start.sub_(mean)
        else:
            self._optimizer.step(start, mean)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common state with the outer momentum."""
        outer = {f"shared.outer.{k}": v for k, v in self._optimizer.state_dict().items()}
        return super().state_dict() | outer

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        prefix = "shared.outer."
        self._optimizer.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
