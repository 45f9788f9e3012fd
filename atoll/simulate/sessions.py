"""When the simulated hub notices lost machines and processes, and when it gives them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.rounds.timing import broken_s
from atoll.simulate.setting import Cause
from atoll.wire.limits import DEAD_AFTER_S

if TYPE_CHECKING:
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.machine import SimulatedMachine
    from atoll.simulate.member import SimulatedMember

SILENT_S, GONE_S = 6.0, DEAD_AFTER_S
"""A lost machine is noticed after three heartbeats, and given up like a session."""
RECONNECT_S = 5.0
"""A process whose connection is broken is given up so much later."""


class SimulatedSessions:
    """Two sessions on each machine: of its agent, and of the member's process, if it has one."""

    def __init__(self, hub: SimulatedHub) -> None:
        self._hub = hub
        self._members: dict[str, int] = {}
        """Members from which nothing arrives, each with the number of its loss."""
        self._machines: dict[str, int] = {}
        """The same of machines."""
        self.since_s: dict[str, float] = {}
        """Since when nothing arrives from these members."""
        self.silent: set[str] = set()
        """Those of them for which rounds do not wait any more."""
        self._losses = 0

    def came(self, machine: SimulatedMachine) -> None:
        """A machine has connected; its agent knows of no process."""
        self._machines.pop(machine.name, None)
        self._hub.placement.came(machine.name)
        if self._hub.begun:
            self._hub.placement.place()

    def lost(self, machine: SimulatedMachine, cause: Cause) -> None:
        """A machine takes no part any more; when the hub notices depends on the cause."""
        hub = self._hub
        member = hub.members.get(hub.placement.member_on(machine.name))
        if cause == Cause.CLOSED:
            hub.placement.went(machine.name)
            if member is not None:
                hub.gone(member, left=True)
            hub.placement.place()
            return
        silent_s, gone_s = SILENT_S, GONE_S
        if cause == Cause.KILLED:
            silent_s, gone_s = broken_s(hub.machine.commit_log.timings), RECONNECT_S
        self._losses += 1
        number = self._machines[machine.name] = self._losses
        if member is not None:
            name = member.name
            self._members[name], self.since_s[name] = number, hub.now()
            hub.scheduler.after(silent_s, lambda: self._silence(name, number))
        hub.scheduler.after(gone_s, lambda: self._end(machine, member, number))

    def resume(self, machine: SimulatedMachine) -> bool:
        """A machine is there again as it was; return whether its session has not ended."""
        self.forget(self._hub.placement.member_on(machine.name))
        return self._machines.pop(machine.name, 0) > 0

    def forget(self, member: str) -> None:
        """A member's process has a session, or is given up: what was noticed before is past."""
        self.silent.discard(member)
        self._members.pop(member, None)
        self.since_s.pop(member, None)

    def _silence(self, member: str, number: int) -> None:
        if self._members.get(member) == number:
            self.silent.add(member)
            self._hub.notice_silence()

    def _end(self, machine: SimulatedMachine, member: SimulatedMember | None, number: int) -> None:
        """The sessions of a machine's agent and of its member's process are over."""
        hub = self._hub
        if member is not None and self._members.get(member.name) == number:
            self.forget(member.name)
            hub.gone(member)
            hub.placement.place()
        if self._machines.get(machine.name) == number:
            del self._machines[machine.name]
            hub.placement.went(machine.name)
            waiting = hub.members.get(hub.placement.member_on(machine.name))
            if waiting is not None:  # its command has not arrived: it has no session of its own
                hub.gone(waiting)
                hub.placement.place()
