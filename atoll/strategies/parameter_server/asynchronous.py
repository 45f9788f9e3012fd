"""Asynchronous Local SGD: members push at any time; momentum is applied once per N pushes.

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"
(https://arxiv.org/abs/2401.09135): delayed Nesterov (Algorithm 2, see
`atoll.reducer.update_rules.DelayedNesterov`) and dynamic local updates (section 4.2): a slow member
takes fewer steps, H_i = floor(v_i / max_j v_j H) with v the measured steps per second, so that all
members push equally often.

Differs from the paper:
  * the state is agreed on periodically in a round of all members, so that it survives a server;
  * the schedule follows the total steps of all members;
  * data is assigned by slots as in every other method, not re-sampled by how far shards lag behind;
  * floating-point buffers move by a member's share of their change.
"""

from __future__ import annotations

from atoll.errors import ConfigError
from atoll.methods.parameter_server import Asynchronous
from atoll.strategies.parameter_server.base import ParameterServerOuter
from atoll.strategies.parameter_server.options import (
    check_lateness,
    check_look_ahead,
    check_step,
)
from atoll.wire.parameter_server_messages import Setup


class AsynchronousOuter(ParameterServerOuter):
    """See the module's docstring."""

    def __init__(self, options: Asynchronous) -> None:
        """Check the options."""
        super().__init__(
            every=options.every, servers=options.servers, anchor_every=options.anchor_every,
            reply=options.reply, weight="equal",
        )  # fmt: skip
        check_lateness(options.staleness, options.staleness_power, options.max_staleness)
        check_step(options.outer_optimizer, options.outer_lr, options.outer_momentum)
        if options.buffer < 0 or not 0 <= options.activation <= 1 / max(1, options.buffer):
            raise ConfigError(
                "delayed Nesterov cannot work with these numbers",
                given=f"buffer = {options.buffer}, activation = {options.activation}",
                expected="buffer of 0 or more, activation of 0 to 1 / buffer",
            )
        check_look_ahead(options.look_ahead, options.outer_optimizer)
        self.options = options

    @property
    def is_plain(self) -> bool:
        """Whether a server only adds up the moves of a single member."""
        return self.options.outer_optimizer == "sgd" and self.options.outer_lr == 1.0

    def server_setup(self, parameters: int, members: int) -> Setup:
        """Return a server's configuration; see :meth:`ParameterServerState.server_setup`."""
        options = self.options
        buffer = options.buffer or members
        return Setup(
            rule=options.outer_optimizer, rate=options.outer_lr, momentum=options.outer_momentum,
            buffer=buffer, activation=min(options.activation, 1 / buffer),
            mode="asynchronous", staleness=options.staleness, power=options.staleness_power,
            limit=options.max_staleness, look_ahead=options.look_ahead, every=options.every,
            dynamic=options.dynamic, parameters=parameters, reply=options.reply,
        )  # fmt: skip
