"""Local SGD: members train alone and average their parameters every H steps.

Stich 2018, "Local SGD Converges Fast and Communicates Little" (https://arxiv.org/abs/1805.09767),
Algorithm 1, with any inner optimizer. With `every_step_until` it is post-local SGD (Lin et al.
2018, "Don't Use Large Mini-Batches, Use Local SGD", https://arxiv.org/abs/1808.07217): members
average in every step at first, then every H steps. With `growing` the interval doubles until H.

Differs from the paper:
  * what is averaged on the wire are differences to the last common parameters, which is the same
    mean and survives coarse codecs;
  * contributions weigh by the tokens they were trained on, unless `weight = "equal"`;
  * floating-point buffers are averaged too; the optimizer's state stays local.
"""

from __future__ import annotations

from torch import Tensor

from atoll.errors import ConfigError
from atoll.methods.periodic import Average
from atoll.strategies.outer.periodic import PeriodicOuter


class AverageOuter(PeriodicOuter):
    """Periodic averaging of parameters; see the module's docstring."""

    def __init__(self, options: Average) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if options.every < 1:
            raise ConfigError("every is too small", given=options.every, expected="1 or more")
        if options.every_step_until < 0:
            raise ConfigError(
                "every_step_until is too small", given=options.every_step_until,
                expected="0 or more",
            )  # fmt: skip
        self.options = options

    def next_due(self, step: int) -> int:
        """Return the next step, the next after a doubling, or the next multiple of `every`."""
        since, every = self.options.every_step_until, self.options.every
        if step < since:
            return step + 1
        if self.options.growing:
            interval = 1
            while interval < every and since + interval <= step:
                since += interval
                interval = min(2 * interval, every)
            every = interval
        return since + ((step - since) // every + 1) * every

    def is_regular(self, step: int) -> bool:
        """Return whether members no longer average in every step, and the interval is constant."""
        return step >= self.options.every_step_until and not self.options.growing

    def is_plain(self, step: int) -> bool:
        """Return True: the mean is taken as it is."""
        return True

    def update(self, start: Tensor, mean: Tensor, *, step: int) -> None:
        """Move to the mean of the members' parameters."""
        start.sub_(mean)
