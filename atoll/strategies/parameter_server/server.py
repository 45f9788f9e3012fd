"""Parameter servers: members push in every step and continue from the servers' newest vector.

Three modes (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"):

  * `synchronous`: a clock's pushes are averaged; with b backup members only the first n - b of them
    (Chen et al. 2016, https://arxiv.org/abs/1604.00981).
  * `stale`: every push counts 1/n at once; no member is over `bound` clocks ahead of the slowest
    (Ho et al. 2013, stale synchronous parallel). A bound of 0 is `synchronous`.
  * `asynchronous`: every push counts at once; a late one less, by 1 / lateness (Zhang et al. 2015,
    https://arxiv.org/abs/1511.05950) or (1 + lateness) ** -a (Xie et al. 2019,
    https://arxiv.org/abs/1903.03934), or corrected by lambda g g (theta_now - theta_read) (DC-ASGD,
    Zheng et al. 2017, https://arxiv.org/abs/1609.08326).

With `optimizer = "member"` members push the step their own optimizer took; otherwise they push the
gradient, clipped on the member, and the servers' SGD takes the step at the member's learning rate.

Differs from the papers:
  * the state is agreed on periodically in a round of all members, so that it survives a server;
  * the schedule follows the total steps of all members;
  * floating-point buffers move by a member's share of their change.
"""

from __future__ import annotations

from torch import Tensor

from atoll.codec.base import Codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.parameter_server import Server
from atoll.strategies.parameter_server.base import ParameterServerOuter
from atoll.strategies.parameter_server.options import check_lateness, check_look_ahead
from atoll.strategies.vectors.flat import Flat
from atoll.strategies.vectors.gradients import dense_gradient
from atoll.task import Task
from atoll.wire.parameter_server_messages import Setup

MODES = ("synchronous", "stale", "asynchronous")
OPTIMIZERS = ("member", "sgd", "momentum", "nesterov")


class ServerOuter(ParameterServerOuter):
    """See the module's docstring."""

    def __init__(self, options: Server) -> None:
        """Check the options."""
        super().__init__(
            every=1, servers=options.servers, anchor_every=options.anchor_every,
            reply=options.reply, weight=options.weight,
        )  # fmt: skip
        check_lateness(options.staleness, options.staleness_power, options.max_staleness)
        for name, known in (("mode", MODES), ("optimizer", OPTIMIZERS)):
            if getattr(options, name) not in known:
                raise ConfigError(
                    f"unknown {name} of parameter servers", given=repr(getattr(options, name)),
                    expected=f"one of {', '.join(known)}",
                )  # fmt: skip
        if options.backups < 0 or options.bound < 0 or not 0 <= options.momentum < 1:
            raise ConfigError(
                "parameter servers cannot work with these numbers",
                given=f"backups = {options.backups}, bound = {options.bound}, "
                f"momentum = {options.momentum}",
                expected="backups and bound of 0 or more, momentum of 0 up to below 1",
            )
        if options.optimizer in ("momentum", "nesterov") and options.momentum == 0:
            raise ConfigError(
                f"optimizer {options.optimizer} does not work without momentum",
                given="momentum = 0", expected="momentum above 0 and below 1",
                remedy='optimizer = "sgd" has none',
            )  # fmt: skip
        if options.compensation < 0 or (options.compensation and options.optimizer == "member"):
            raise ConfigError(
                "late steps cannot be compensated, only gradients can",
                given=f'compensation = {options.compensation}, optimizer = "{options.optimizer}"',
                expected="compensation of 0 or more, and an optimizer of the servers",
                remedy='optimizer = "sgd"',
            )
        _check_mode(options)
        check_look_ahead(options.look_ahead, options.optimizer)
        if options.look_ahead and options.compensation:
            raise ConfigError(
                "look-ahead and compensation correct the same delay",
                given=f"look_ahead = {options.look_ahead}, compensation = {options.compensation}",
                expected="one of them", remedy="compensation = 0",
            )  # fmt: skip
        self.options = options
        self.moves = options.optimizer == "member"
        self._rate = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether a server only adds up the steps of a single member."""
        return self.moves

    def server_setup(self, parameters: int, members: int) -> Setup:
        """Return a server's configuration; see :meth:`ParameterServerState.server_setup`."""
        options = self.options
        return Setup(
            rule="sgd" if self.moves else options.optimizer, momentum=options.momentum,
            mode=_mode(options), bound=options.bound, backups=options.backups,
            staleness=options.staleness, power=options.staleness_power, limit=options.max_staleness,
            compensation=options.compensation, look_ahead=options.look_ahead,
            parameters=parameters, reply=options.reply,
        )  # fmt: skip

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state."""
        if not self.moves and len({group["lr"] for group in task.optimizer.param_groups}) > 1:
            raise ConfigError(
                "the servers' optimizer has one rate for all parameters",
                given="an optimizer with several", remedy='optimizer = "member"',
            )  # fmt: skip
        super().setup(task, group=group, codec=codec)

    def gradients(self, task: Task) -> None:
        """Keep this step's learning rate: the schedule moves on before the push."""
        self._rate = float(task.optimizer.param_groups[0]["lr"])

    def push_rate(self) -> float:
        """Return the learning rate at which the servers' optimizer takes this step."""
        return 1.0 if self.moves else self._rate

    def learned(self, task: Task) -> Tensor:
        """Return the last step, or the gradient."""
        if self.moves:
            return super().learned(task)
        slots = [*map(dense_gradient, task.parameters()), *task.buffers()]
        Flat(slots).read(self._scratch)
        buffers = slice(self._shards.num_parameters, None)
        self._scratch[buffers] = self._start[buffers] - self._scratch[buffers]
        return self._scratch


def _mode(options: Server) -> str:
    """Return what the servers do: a bound of 0 means synchronous."""
    return "synchronous" if options.mode == "stale" and not options.bound else options.mode


def _check_mode(options: Server) -> None:
    """Refuse options that have no meaning in a mode.

    Raises:
        ConfigError: one is set.
    """
    late = options.staleness != "constant" or options.max_staleness or options.compensation
    late = late or options.look_ahead
    if _mode(options) == "synchronous" and late:
        raise ConfigError(
            "synchronous mode has no late pushes",
            given=f"staleness = {options.staleness!r}, max_staleness = {options.max_staleness}, "
            f"compensation = {options.compensation}, look_ahead = {options.look_ahead}",
            expected='mode = "asynchronous", or "stale" with a bound above 0',
            remedy='mode = "asynchronous"',
        )
    if options.mode != "synchronous" and options.backups:
        raise ConfigError(
            "backups need synchronous mode",
            given=f"backups = {options.backups}, mode = {options.mode!r}",
            expected="backups = 0", remedy='mode = "synchronous"',
        )  # fmt: skip
