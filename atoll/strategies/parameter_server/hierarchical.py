"""HALoS: asynchronous Local SGD with a model per region, merged into a global one now and then.

Kim et al. 2025, "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed
Large Language Model Training" (https://arxiv.org/abs/2506.04531), Algorithm 1. The servers' part is
`atoll.reducer.region_rule`; a member sees one vector, its region's, and pushes as in
`atoll.strategies.parameter_server.asynchronous`.

Differs from the paper:
  * the regions' models are held by the job's parameter servers, not by one server in each region:
    every push crosses the link to the hub, so that the hierarchy changes what is learned and not
    what is sent;
  * see `atoll.reducer.region_rule` for merges and sync points;
  * regions are neighbouring slots; a member that joins later goes to the smallest one until the
    next sync point, at which members are assigned anew;
  * steps, schedule, data and buffers as in `atoll.strategies.parameter_server.asynchronous`.
"""

from __future__ import annotations

from atoll.errors import ConfigError
from atoll.methods.parameter_server import Hierarchical
from atoll.strategies.parameter_server.base import ParameterServerOuter
from atoll.strategies.parameter_server.options import check_step
from atoll.wire.parameter_server_messages import MOST_REGIONS, Setup, region_of

ROUNDS_APART = 20
"""Pushes of a member between two sync points, which send the momenta of all regions."""


class HierarchicalOuter(ParameterServerOuter):
    """See the module's docstring."""

    def __init__(self, options: Hierarchical) -> None:
        """Check the options."""
        super().__init__(
            every=options.every, servers=options.servers,
            anchor_every=options.anchor_every or ROUNDS_APART * options.every,
            reply=options.reply, weight="equal",
        )  # fmt: skip
        check_step(options.outer_optimizer, options.outer_lr, options.outer_momentum)
        check_step(
            options.region_optimizer, options.region_lr, options.region_momentum, of="region"
        )
        if not 1 <= options.regions <= MOST_REGIONS or options.merge_every < 1:
            raise ConfigError(
                "a hierarchy of servers cannot work with these numbers",
                given=f"regions = {options.regions}, merge_every = {options.merge_every}",
                expected=f"regions of 1 to {MOST_REGIONS}, merge_every of 1 or more",
            )
        if not 0 < options.mix <= 1 or options.buffer < 0:
            raise ConfigError(
                "a hierarchy of servers cannot work with these numbers",
                given=f"mix = {options.mix}, buffer = {options.buffer}",
                expected="mix above 0 and up to 1, buffer of 0 or more",
            )
        self.options = options

    @property
    def is_plain(self) -> bool:
        """Whether a server only adds up the moves of a single member."""
        options = self.options
        return (
            options.outer_optimizer == options.region_optimizer == "sgd"
            and options.outer_lr == options.region_lr == options.mix == 1.0
        )

    def server_setup(self, parameters: int, members: int) -> Setup:
        """Return a server's configuration; see :meth:`ParameterServerState.server_setup`."""
        options, sizes = self.options, [0] * self.options.regions
        for slot in range(members):
            sizes[region_of(slot, members=members, regions=len(sizes))] += 1
        return Setup(
            rule=options.outer_optimizer, rate=options.outer_lr, momentum=options.outer_momentum,
            buffer=options.buffer or len(sizes), regions=sizes, merge_every=options.merge_every,
            mix=options.mix, region_rule=options.region_optimizer, region_rate=options.region_lr,
            region_momentum=options.region_momentum, every=options.every, dynamic=options.dynamic,
            parameters=parameters, reply=options.reply,
        )  # fmt: skip
