"""Recovery of the simulated hub: who has the committed state, and how it comes to a newcomer.

What `hub/rounds/recovery.py` does with sockets; the state is a size on lines that others use, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.errors import GroupError

if TYPE_CHECKING:
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.member import SimulatedMember

SAVE_EVERY = 10
"""Rounds between two checkpoints, to which the run goes back if no member has the state."""


class SimulatedRecovery:
    """See the module's docstring."""

    def __init__(self, hub: SimulatedHub) -> None:
        self._hub = hub

    def recover(self, member: SimulatedMember) -> None:
        """Handle Recover, as `RecoveryCoordinator.recover`."""
        hub = self._hub
        hub.carry_out(
            hub.timed(
                "recover",
                lambda: hub.machine.recover(member.name, hub.now(), needs_s=member.needs_s),
            )
        )

        def go_on() -> None:
            if hub.members.get(member.name) is member and member.process.alive:
                self._send_state(member)

        if hub.machine.attempt is not None:
            hub.undecided.append(go_on)
        else:
            hub.scheduler.after(hub.setting.costs.recover_s, go_on)

    def _send_state(self, member: SimulatedMember) -> None:
        hub, machine = self._hub, self._hub.machine
        named = hub.timed("holders", lambda: machine.members.holders(member.name, ()))
        holders = [m for m in named if hub.members[m].process.alive]
        if not holders and machine.committed_round:
            back = machine.committed_round // SAVE_EVERY * SAVE_EVERY
            hub.record.events["set back"] += 1
            machine.rewind(back, {})
            hub.base = f"checkpoint-{back}"
        share = machine.newcomer(member.name, hub.now(), whole=not holders)
        slots = machine.commit_log.data_slots
        lease = slots.lease(member.name) if slots.cursors else None
        hub.count("sources", 60 * len(holders))
        round_, base, size = machine.committed_round, hub.base, hub.setting.newcomer_bytes
        self._fetch(member, holders, size, lambda: member.recovered(round_, base, share, lease))

    def _fetch(
        self, member: SimulatedMember, holders: list[str], nbytes: float, then: Callable[[], None]
    ) -> None:
        """Let a member have the state: from one of its site, another member, or the hub."""
        hub, scheduler, now = self._hub, self._hub.scheduler, self._hub.now()
        holding = hub.machine.members.up_to_date
        near = [m for m in member.reachable if m in holding and m != member.name]
        near = [m for m in near if hub.members[m].process.alive]
        if near:
            donor = hub.members[near[member.slot % len(near)]]
            hub.record.events["bytes inside sites"] += round(nbytes)
            inside_bps = member.machine.inside_bps(donor.machine)
            scheduler.after(8 * nbytes / inside_bps, then, member.process)
        elif holders:  # newcomers begin at different donors, as `ask_order` does
            donor = hub.members[holders[member.slot % len(holders)]]
            sending_s = 8 * nbytes / donor.profile.up_bps
            begun = max(now, hub.network.relayed_in(donor.machine, now, nbytes) - sending_s)
            slower_s = 8 * nbytes / min(donor.profile.up_bps, member.profile.down_bps)

            def pass_on() -> None:  # not before: until then the hub's line carries other bytes
                arrived = hub.network.relayed_out(member.machine, hub.now(), nbytes)
                scheduler.at(max(begun + slower_s, arrived), then, member.process)

            scheduler.at(begun, pass_on, member.process)
        else:
            arrived = hub.network.relayed_out(member.machine, now, nbytes)
            scheduler.at(arrived, then, member.process)

    def stand(
        self, member: SimulatedMember, round_: int, base: str,
        answer: Callable[[GroupError | None], None],
    ) -> None:  # fmt: skip
        """Handle Standing, as `RecoveryCoordinator.standing`."""
        hub = self._hub
        try:
            effects = hub.machine.stand(member.name, round_, base, hub.now())
        except GroupError as found:
            error = found
            hub.tell("refused", member, None, lambda: answer(error))
            return
        hub.tell("done", member, None, lambda: answer(None))
        hub.carry_out(effects)
