"""Rebuild a ledger after a restart of the hub, from what its members announce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.swarm.places import Member
from atoll.wire.swarm import Holder, SwarmAnnounce

if TYPE_CHECKING:
    from atoll.swarm.ledger import Ledger


def take_over(ledger: Ledger, member: str, body: SwarmAnnounce) -> bool:
    """Believe a member of an earlier ledger; False if another one has its shares."""
    known = body.epoch > 0 and 0 <= body.stage < ledger.settings.stages
    if not known or body.history < ledger.history:
        return False
    if body.history > ledger.history:  # the others' states are of an earlier history
        ledger.members = {}
        ledger.begin(body.step)
        ledger.history = body.history
    behind = body.step < ledger.step
    if behind and not (body.agreed and body.step == ledger.step - 1):
        return False
    if body.step > ledger.step:
        _leap(ledger, body.step)
    holder, count = Holder(member, body.epoch), ledger.counts[body.stage]
    mine, ahead = (body.ahead, []) if behind else (body.folded, body.ahead)
    if not (body.agreed and not behind):
        if count.agreed_by and mine:
            return False
        if any(share.index in count.counted for share in mine):
            return False
    after = ledger.steps.ahead[body.stage]
    if any(share.index in after.counted for share in ahead):
        return False
    leases = [share.lease for share in (*mine, *ahead)]
    ledger.number = max(ledger.number, body.epoch, body.history, *leases) + 1
    for share in mine:
        count.count(share.index, share.lease, holder)
    if body.last >= 0:  # else some members would end at that step, others at a later one
        ledger.saves.stop(body.last)
    for share in ahead:
        after.count(share.index, share.lease, holder)
    ledger.members[member] = Member(holder, body.stage, ready=True)
    ledger.table += 1
    return True


def _leap(ledger: Ledger, step: int) -> None:
    """A member is at a later step, so this one was complete; only who agreed can follow."""
    follows = step == ledger.step + 1
    for name, member in list(ledger.members.items()):
        if not (follows and member.applies):
            del ledger.members[name]
            ledger.steps.lose(member.holder)
    if follows:
        ledger.go_on()
    else:
        ledger.begin(step)
