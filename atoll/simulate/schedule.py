"""When members meet and what they send: typed by hand, or of a job by its method's accounting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one member in one round, encoded."""

    relay_sent: float
    relay_received: float
    direct_sent: float
    direct_received: float
    relay_last: float = math.inf
    """Of those received from the hub, what waits for the last contribution."""


def typed(nbytes: float, members: int) -> Moved:
    """Return what a member moves whose contribution has so many bytes.

    On the direct route it is a ring: 2 (n - 1) / n of them.
    """
    ring = 2 * (members - 1) / members * nbytes if members > 1 else 0.0
    return Moved(nbytes, nbytes, ring, ring)


MovedIn = Callable[[int, int], Moved]
"""Number of a round and its members -> bytes of each; of a team also those of its own reduce."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rounds of a method, in steps of a member at full pace."""

    every: int = 500
    """Between two rounds."""
    shared_steps: int = 0
    """First steps, which all members do on the same data before they compare once more."""
    steps: int = 0
    """Of the whole job; 0: it has no end."""
    rounds: int = 0
    """Of the whole job; 0: it has no end."""
    hidden: int = 0
    """Steps that members go on while a round is under way, at most."""
    first_hidden: int = 0
    """How many at first, if the verdicts say how many later (`delay = "auto"`); 0: they do not."""
    paced: bool = True
    """Whether slower members do fewer steps."""
    moved: MovedIn | None = None
    """None: as typed, see `Setting.exchange_bytes`."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError("every of a simulation is too small", given=self.every,
                              expected="at least 1")  # fmt: skip

    @property
    def marks(self) -> int:
        """First rounds, in which members only compare what they begin with."""
        return 1 + (self.shared_steps > 0)

    def steps_before(self, round_: int, *, every: int) -> int:
        """Return the steps of the period that ends with a round; `every` as verdicts say."""
        if round_ == 0:
            return 0
        if round_ < self.marks:
            return self.shared_steps
        if not self.steps:
            return every
        begun = self.shared_steps + (round_ - self.marks) * every
        return max(1, min(every, self.steps - begun))

    def steps_until(self, round_: int) -> int:
        """Return the steps that so many committed rounds contain."""
        done = self.shared_steps if round_ > 1 else 0
        done += max(0, round_ - self.marks) * self.every
        return min(done, self.steps) if self.steps else done

    def hidden_before(self, round_: int, *, delay: int, every: int) -> int:
        """Return how many of these steps are done before the last round's verdict is needed.

        `delay` is that of the last verdict, or 0.
        """
        if round_ <= self.marks:  # nothing is under way yet
            return 0
        wanted = self.hidden if not self.first_hidden else (delay or self.first_hidden)
        return min(wanted, self.hidden, self.steps_before(round_, every=every))
