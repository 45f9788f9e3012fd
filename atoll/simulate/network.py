"""Lines of members and of the hub, through which contributions, results and states pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.simulate.lines import SharedLine
from atoll.simulate.record import Record
from atoll.simulate.setting import Setting

if TYPE_CHECKING:
    from atoll.simulate.machine import SimulatedMachine


class Network:
    """Every machine's line, and the hub's, which all share."""

    def __init__(self, setting: Setting, record: Record) -> None:
        """Prepare the hub's line; 0 Mbit/s: any number."""
        down_mbps, up_mbps = setting.fleet.hub_rates_mbps
        self.line_in, self.line_out = SharedLine(down_mbps * 1e6 / 8), SharedLine(up_mbps * 1e6 / 8)
        self.relay = SharedLine(setting.costs.relay_bytes_per_s)
        """The hub's processor, of the bytes that it forwards between messages."""
        self._record = record
        self._up: dict[str, SharedLine] = {}
        self._down: dict[str, SharedLine] = {}

    def add(self, machine: SimulatedMachine) -> None:
        """Take the line of a machine into the network."""
        self._up[machine.name] = SharedLine(machine.profile.up_bps / 8)
        self._down[machine.name] = SharedLine(machine.profile.down_bps / 8)

    def relayed_in(self, machine: SimulatedMachine, now: float, nbytes: float) -> float:
        """Return when a machine's bytes are at the hub, or at the reducer beside it."""
        own = self._up[machine.name].take(now, nbytes)
        shared = self.line_in.take(now, nbytes)
        self._record.deepest("line into the hub, s", shared - now)
        self._record.events["bytes sent"] += round(nbytes)
        cut_s = machine.line_until_s + 8 * nbytes / machine.profile.up_bps
        return max(own, shared, self.relay.take(now, nbytes), cut_s) + machine.profile.one_way_s

    def relayed_out(self, machine: SimulatedMachine, now: float, nbytes: float) -> float:
        """Return when bytes of the hub are at a machine."""
        own = self._down[machine.name].take(now, nbytes)
        shared = self.line_out.take(now, nbytes)
        self._record.deepest("line out of the hub, s", shared - now)
        cut_s = machine.line_until_s + 8 * nbytes / machine.profile.down_bps
        return max(own, shared, self.relay.take(now, nbytes), cut_s) + machine.profile.one_way_s
