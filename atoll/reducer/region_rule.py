"""A hierarchy of update rules: a model per region, merged into a global one every K pushes.

HALoS (Kim et al. 2025, https://arxiv.org/abs/2506.04531), Algorithm 1. Legend: theta the global
vector, theta_r that of region r, which its members pull, u_r what region r has moved since its last
merge, x a member's push.

  a push of region r:  d = the move of its rule for x ; theta_r -= d ; u_r += d
  its K-th:            the global rule applies u_r to theta ; u_r = 0
                       theta_r += alpha (theta - theta_r)
  a sync point:        each region with u_r merges ; theta_r = theta for all

Differs from the paper:
  * one process holds all regions, so a merge takes no time: there are no pushes between a region's
    report and its answer, which in the paper never reach the global model;
  * at a sync point all regions merge and take the global model: the state that is saved is that
    model and the rules' momenta, and contains every push.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from atoll.errors import WireError
from atoll.reducer.update_rules import Rule, make_rule
from atoll.wire.parameter_server_messages import MOST_REGIONS, Setup


class RegionRule(Rule):
    """See the module's docstring. `lr` is the global rule's rate."""

    def __init__(self, setup: Setup) -> None:
        """Make the rules of the global model and of every region.

        Raises:
            WireError: a rule is unknown, or there are too many regions.
        """
        if not 1 <= len(setup.regions) <= MOST_REGIONS or setup.merge_every < 1:
            raise WireError(
                "a hierarchy of servers cannot work with these numbers",
                given=f"{len(setup.regions)} regions, merge_every = {setup.merge_every}",
                expected=f"1 to {MOST_REGIONS} regions, merge_every of 1 or more",
            )
        one = msgspec.structs.replace(setup, regions=[])
        inside = msgspec.structs.replace(
            one, rule=setup.region_rule, momentum=setup.region_momentum, activation=0.0
        )
        self._rules = {"global": make_rule(one)}
        for region, size in enumerate(setup.regions):
            self._rules[f"region-{region}"] = make_rule(
                msgspec.structs.replace(inside, buffer=max(1, size))
            )
        self._rate, self._every, self._mix = setup.region_rate, setup.merge_every, setup.mix
        self._models = [torch.zeros(setup.parameters) for _ in setup.regions]
        self._unmerged = [torch.zeros(setup.parameters) for _ in setup.regions]
        self._pushes = [0] * len(setup.regions)
        self.vectors = {
            f"{name}.{key}": vector
            for name, rule in self._rules.items()
            for key, vector in rule.vectors.items()
        }

    @property
    def scalars(self) -> dict[str, float]:  # type: ignore[override]
        """The numbers of all rules."""
        return {
            f"{name}.{key}": value
            for name, rule in self._rules.items()
            for key, value in rule.scalars.items()
        }

    def start(self, theta: Tensor, scalars: Mapping[str, float]) -> None:
        """See :meth:`Rule.start`: every region begins with the global model."""
        for name, rule in self._rules.items():
            own = {
                key: scalars[f"{name}.{key}"] for key in rule.scalars if f"{name}.{key}" in scalars
            }
            rule.start(theta, own)
        for region, model in enumerate(self._models):
            model.copy_(theta)
            self._unmerged[region].zero_()
            self._pushes[region] = 0

    def apply(self, theta: Tensor, x: Tensor, *, lr: float, region: int = 0) -> None:
        """See :meth:`Rule.apply`; merges the region if it is due."""
        move = torch.zeros_like(x)
        self._rules[f"region-{region}"].apply(move, x, lr=self._rate)
        self._models[region].add_(move)
        self._unmerged[region].sub_(move)
        self._pushes[region] += 1
        if self._pushes[region] >= self._every:
            self._merge(theta, region, lr=lr)
            model = self._models[region]
            if self._mix == 1.0:  # exactly
                model.copy_(theta)
            else:
                model.lerp_(theta, self._mix)

    def model_of(self, theta: Tensor, region: int) -> Tensor:
        """See :meth:`Rule.model_of`."""
        return self._models[region]

    def settle(self, theta: Tensor, *, lr: float) -> bool:
        """See :meth:`Rule.settle`: every region merges and takes the global model."""
        due = [region for region, pushes in enumerate(self._pushes) if pushes]
        for region in due:
            self._merge(theta, region, lr=lr)
        for model in self._models:
            model.copy_(theta)
        return bool(due)

    def working(self) -> list[Tensor]:
        """See :meth:`Rule.working`."""
        return [*self._models, *self._unmerged]

    def _merge(self, theta: Tensor, region: int, *, lr: float) -> None:
        self._rules["global"].apply(theta, self._unmerged[region], lr=lr)
        self._unmerged[region].zero_()
        self._pushes[region] = 0


def server_rule(setup: Setup) -> Rule:
    """Return the configured rule, of one model or of regions; raises WireError."""
    return RegionRule(setup) if setup.regions else make_rule(setup)
