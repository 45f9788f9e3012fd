"""What tokens are worth under a method: a gain between one member's and all members' tokens.

With n members at equal steps, data parallel trains on n times the tokens. A method whose members
meet rarely gains less: as much as data parallel with n^g members, where g = 1 is data parallel and
g = 0 is one member alone. Where a scaling law was fitted to runs of this method, it replaces this.

low     g measured by `python -m bench.methods` (docs/measured/benchmarks.md): 1.0 M parameters, 600
        steps, 4 members, one language: so short that rare rounds look worse than in a long run.
high    for methods with rounds now and then 1 - 0.0116 / 0.095 = 0.878: the loss grows by
        M^0.0116 with M members (Charles et al. 2025, https://arxiv.org/abs/2503.09799, joint fit of
        35 M to 2.4 B parameters, H = 30, as quoted; not measured by us), and falls with tokens by
        D^-0.095 (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361). For methods that meet in
        every step 1: their papers report no loss.
middle  half way between both: a guess between these bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.forecast.workload import gain_exponent

DATA_PARALLEL, ONE_MEMBER = 1.590, 1.996
"""Held-out loss of data parallel with 4 members, and of one member, in bench.methods."""

PERIODIC_HIGH = 1 - 0.0116 / 0.095

BY_INTERVAL = ((1, DATA_PARALLEL), (10, 1.759), (24, 1.796), (50, 1.858), (200, 1.978))
"""Steps between two rounds of DiLoCo -> loss."""
DILOCO_AT = 24
"""Interval of the other periodic methods there."""

PERIODIC: Mapping[str, float] = {
    "diloco": 1.796, "open-diloco": 1.818, "intellect-1": 1.822, "muloco": 1.771,
    "local-sgd": 1.830, "fedavg": 1.830, "slowmo": 1.877, "noloco": 1.873,
    "streaming-diloco": 1.788, "eager-diloco": 2.279,
}  # fmt: skip
"""Preset -> loss with rounds every 24 steps."""
DELAYED = {"streaming-diloco": (3, 1.813)}
"""Preset -> a delay, and the loss with it; the loss above has a delay of 1."""
EVERY_STEP: Mapping[str, float] = {
    "ddp": DATA_PARALLEL, "powersgd": 1.750, "signsgd": 1.739, "one-bit-adam": 1.601,
    "demo": 1.805, "cocktail-sgd": 1.819,
}  # fmt: skip
CODED = {"ddp": (("int8", 1.607),)}
"""Preset -> codecs with their losses."""


@dataclass(frozen=True)
class Gain:
    """How many members a method's members are worth: n^low to n^high."""

    low: float
    middle: float
    high: float
    ground: str

    def worth(self, members: float) -> tuple[float, float, float]:
        """Return the members that so many are worth."""
        if members <= 1:
            return members, members, members
        return members**self.low, members**self.middle, members**self.high


ALONE = Gain(1.0, 1.0, 1.0, "one machine")


def known(preset: str) -> bool:
    """Return whether anything is measured of a method."""
    return preset in PERIODIC or preset in EVERY_STEP


def gain_of(preset: str, *, every: int, delay: int, codec: str) -> Gain:
    """Return what a method's tokens are worth, with what the numbers rest on.

    Args:
        preset: The method.
        every: Steps between two rounds of the same values.
        delay: Steps until the result is applied.
        codec: Of the job.

    Raises:
        ConfigError: nothing is measured of this method.
    """
    if not known(preset):
        raise ConfigError(
            "nothing was measured of what this method costs in loss", given=preset,
            expected="one of " + ", ".join((*PERIODIC, *EVERY_STEP)),
        )  # fmt: skip
    if preset in EVERY_STEP:
        losses = dict(CODED.get(preset, ()))
        loss = next((x for name, x in losses.items() if name in codec), EVERY_STEP[preset])
        low = gain_exponent(DATA_PARALLEL, loss, ONE_MEMBER)
        return Gain(low, (low + 1) / 2, 1.0, "bench.methods (low) and its paper (high)")
    low = _periodic_low(preset, every=every, delay=delay)
    high = max(low, PERIODIC_HIGH)
    words = "bench.methods at 1.0 M parameters (low), a published law (high)"
    longest = BY_INTERVAL[-1][0]
    if every > longest:
        words += f"; nothing was measured with rounds more than {longest} steps apart"
    return Gain(low, (low + high) / 2, high, words)


def _periodic_low(preset: str, *, every: int, delay: int) -> float:
    """Return the measured share of the gain, between intervals by the logarithm of the steps."""
    own = gain_exponent(DATA_PARALLEL, PERIODIC[preset], ONE_MEMBER)
    if preset in DELAYED and delay > 1:
        at, loss = DELAYED[preset]
        late = gain_exponent(DATA_PARALLEL, loss, ONE_MEMBER)
        own = max(0.0, own - (own - late) * (delay - 1) / (at - 1))
    return min(1.0, own * _by_interval(every) / _by_interval(DILOCO_AT))


def _by_interval(every: int) -> float:
    points = [
        (math.log(steps), gain_exponent(DATA_PARALLEL, loss, ONE_MEMBER))
        for steps, loss in BY_INTERVAL
    ]
    where = math.log(max(1, every))
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if where <= x1:
            return y0 + (y1 - y0) * (where - x0) / (x1 - x0)
    return points[-1][1] * points[-1][0] / where
