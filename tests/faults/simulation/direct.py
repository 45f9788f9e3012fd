"""The direct route between simulated processes: all send to all, any connection may break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.codec.base import Codec, Packet
from atoll.codec.registry import make_codec
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.group.collectives.collectives import Exchanged
from atoll.group.routes.direct import DirectGroup
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.requests import ReduceRequest
from atoll.reducer.mean import Share, mean_of, result_digest
from atoll.wire.messages import RoundPlan
from tests.faults.simulation.fibers import Parking

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

CONNECT_S = 20.0


class SimulatedDirect:
    """Stands in for `DirectRoute`."""

    def __init__(self, world: World, *, address: str, job: str, me: str) -> None:
        self.world, self.me = world, me
        self.process: Any = world.fibers.me().process
        self.dial = f"{address}:{world.number()}"
        self.identities: Any = None
        self.first_epoch = 0
        self.lines: dict[str, tuple[float, float]] = {}
        self.broken: set[Any] = set()
        """Processes whose connection to this one broke during the present exchange."""
        self._peers: dict[str, SimulatedDirect] = {}
        self.mailbox: dict[tuple[int, str], Share] = {}
        self._serial = 0
        self.parking = Parking(world.fibers)
        world.stores[self.dial] = self

    def trust(self, lines: MemberLines) -> None:
        assert lines.key, "the hub hands out the key of the job"

    def prepare(self, meeting: DirectGroup) -> None:
        """Connect with nobody: here connections cost nothing."""

    def begin(self) -> int:
        self._serial += 1
        return self._serial

    def exchange(self, request: ReduceRequest) -> Exchanged:
        plan, codec, serial = request.plan, request.codec, request.serial
        scheduler = self.world.scheduler
        deadline = scheduler.now + plan.timeout_s
        packet = codec.encode(request.vector, key=request.key)
        own = Share(self.me, packet, request.weight)
        self.mailbox = {(plan.epoch, self.me): own}
        meet_by = min(deadline, scheduler.now + CONNECT_S)
        peers = self._peers = self._meet(plan, meet_by, serial)
        self.broken = set()
        try:
            shares = self._all_shares(plan, own, serial, deadline)
        except (PeerLost, DeadlineExceeded):
            for peer in peers.values():  # its connections go with it, so that the others know
                self.world.tell_broken(peer, self.process)
            raise
        finally:
            self._peers = {}
        self._check(serial)
        self.world.reached("member", "result", self.process)
        return self._mean(shares, codec)

    def _all_shares(self, plan: RoundPlan, own: Share, serial: int, deadline: float) -> list[Share]:
        """Send the own share to all, and return everybody's."""
        self.world.reached("member", "contributing", self.process)
        peers = self._peers
        for peer in peers.values():
            self._send(peer, plan.epoch, own)
        self.world.reached("member", "reducing", self.process)
        wanted = [(plan.epoch, member) for member in plan.members]
        while any(entry not in self.mailbox for entry in wanted):
            self._check(serial)
            lost = [
                m for m, peer in peers.items()
                if peer.process in self.broken and (plan.epoch, m) not in self.mailbox
            ]  # fmt: skip
            if lost:
                raise PeerLost("a member's connection broke", given=lost[0])
            left_s = deadline - self.world.scheduler.now
            if left_s <= 0:
                raise DeadlineExceeded("the exchange took too long", given=f"{plan.timeout_s} s")
            self.parking.wait(left_s)
        return [self.mailbox[entry] for entry in wanted]

    def meet(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse meetings by sites: collectives are not simulated, so the hub falls back to relay.

        Raises:
            PeerLost: always.
        """
        raise PeerLost("the simulation has no meetings by sites")

    def _mean(self, shares: list[Share], codec: Codec) -> Exchanged:
        mean = mean_of(shares, codec=codec.base)
        packet: Packet = mean.packet
        digest = result_digest(packet.data, mean.contributors)
        size = len(packet.data)
        vector = make_codec(packet.codec).decode(packet)
        return Exchanged(vector, mean.contributors, mean.weight, digest, size, size)

    def _meet(self, plan: RoundPlan, deadline: float, serial: int) -> dict[str, SimulatedDirect]:
        """Find the others at the store of the first, as a rendezvous does."""
        store = self.world.stores.get(plan.store)
        if store is None:
            raise PeerLost("nobody listens at the store", given=plan.store)
        room = self.world.meetings.setdefault((plan.store, plan.epoch), {})
        room[self.me] = self
        for other in room.values():
            other.parking.wake()
        while len(room) < len(plan.members):
            self._check(serial)
            left_s = deadline - self.world.scheduler.now
            if left_s <= 0:
                raise PeerLost("a member did not come to the store", given=str(sorted(room)))
            self.parking.wait(left_s)
        return {member: room[member] for member in plan.members if member != self.me}

    def _send(self, peer: SimulatedDirect, epoch: int, share: Share) -> None:
        def arrive() -> None:
            if self.process.alive and self.process not in peer.broken:
                peer.mailbox[epoch, share.member] = share
                peer.parking.wake()

        lines = [self.process.line, peer.process.line]
        when = max(line.arrival(200, 0) for line in lines)
        self.world.scheduler.at(when, arrive, peer.process)

    def broke(self, process: Any) -> None:
        """The connection to another process ended, if there was one."""
        if any(peer.process is process for peer in self._peers.values()):
            self.broken.add(process)
            self.parking.wake()

    def _check(self, serial: int) -> None:
        if serial != self._serial:
            raise PeerLost("this exchange was abandoned")

    def drop(self) -> None:
        self.begin()
        self.parking.wake()

    def close(self) -> None:
        self.drop()
