"""Machines and links as a simulated pipeline sees them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What carries tensors away from a machine, or between the ranks of one."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    concurrent: int = 4
    """Most transfers at one time; further ones wait."""
    busy_s: float = 0.0
    """Processor time of a transfer on each side, besides that of its bytes."""
    busy_s_per_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the time of a transfer that has the link to itself."""
        return self.latency_s + nbytes / self.bytes_per_s

    def busy(self, nbytes: float) -> float:
        """Return the processor time of a transfer on each side."""
        return self.busy_s + nbytes * self.busy_s_per_byte


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as ranks see it."""

    cores: float = math.inf
    """Ranks that compute at full speed at one time; infinite if each has an accelerator."""
    speed: float = 1.0
    """Relative to the machine on which the stages were measured."""
    rates: tuple[float, ...] = ()
    """Measured share of its speed that a rank has while 1, 2, ... compute; empty: by `cores`."""

    def rate(self, computing: int) -> float:
        """Return the speed of each of so many ranks that compute at one time."""
        if not self.rates:
            return self.speed * min(1.0, self.cores / computing)
        known = min(computing, len(self.rates))
        return self.speed * self.rates[known - 1] * known / computing


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The machines of a pipeline, and the host of every rank, row after row."""

    hosts: tuple[Host, ...] = (Host(),)
    of_rank: tuple[int, ...] = ()
    """Number of the host by rank; empty: one row on the first host."""
    near: Link = Link()
    """Between ranks of one host."""
    far: Link = Link()
    """Out of a host; its ranks share it."""
