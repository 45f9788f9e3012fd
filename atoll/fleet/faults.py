"""What goes wrong in a rehearsal, and when: `[[faults]]` of a file of machines. Values only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.config.constraints import Amount
from atoll.errors import ConfigError, unknown


class Trouble(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """Its processes are killed; they start again after `for_s`, or never."""
    SLEEP = "sleep"
    """The machine is suspended for `for_s`, like a laptop that is closed."""
    CUT = "cut"
    """Its line carries nothing for `for_s`; it goes on computing."""
    JOIN = "join"
    """It joins at `at_s`; before that it takes no part."""


ENDLESS = frozenset({Trouble.KILL, Trouble.CUT})
"""Faults that may last to the end: `for_s` is 0."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`[[faults]]`: one event of one machine. Seconds count from the first step."""

    what: str
    """`kill`, `sleep`, `cut` or `join`."""
    machine: str
    at_s: Amount = 0.0
    """When."""
    for_s: Amount = 0.0
    """How long; 0: to the end."""

    @property
    def trouble(self) -> Trouble:
        """The kind."""
        return Trouble(self.what)

    @property
    def absence(self) -> tuple[float, float]:
        """From when to when the machine takes no part."""
        if self.trouble == Trouble.JOIN:
            return 0.0, self.at_s
        return self.at_s, self.at_s + self.for_s if self.for_s else float("inf")


def check_faults(faults: Sequence[Fault], machines: Sequence[str]) -> None:
    """Raise ConfigError for faults that are unknown, of no machine, or contradict each other."""
    for fault in faults:
        if fault.what not in list(Trouble):
            raise unknown("fault", fault.what, list(Trouble))
        if fault.machine not in machines:
            raise unknown("machine of a fault", fault.machine, machines)
        if fault.trouble == Trouble.SLEEP and not fault.for_s:
            raise ConfigError(
                "a machine that sleeps needs a time to wake up",
                given=f"{fault.machine} at {fault.at_s:g} s", expected="for_s = 30",
                remedy='what = "kill" ends it for good',
            )  # fmt: skip
        if fault.trouble == Trouble.JOIN and not (fault.at_s and not fault.for_s):
            raise ConfigError(
                "a machine joins once, some time after the first step",
                given=f"{fault.machine}: at_s = {fault.at_s:g}, for_s = {fault.for_s:g}",
                expected="at_s = 60, and no for_s",
            )  # fmt: skip
    for name in {fault.machine for fault in faults}:
        _check_order([fault for fault in faults if fault.machine == name])


def _check_order(faults: Sequence[Fault]) -> None:
    """Raise ConfigError if a machine is away twice at the same time."""
    ordered = sorted(faults, key=lambda fault: fault.absence)
    for fault, then in itertools.pairwise(ordered):
        if then.absence[0] < fault.absence[1]:
            raise ConfigError(
                f"{fault.machine} is away already when its next fault comes",
                given=f"{fault.what} from {fault.absence[0]:g} to {fault.absence[1]:g} s, "
                f"{then.what} at {then.absence[0]:g} s",
                expected="faults of one machine one after the other",
            )  # fmt: skip
