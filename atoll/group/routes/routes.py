"""The routes of one member: direct, through the reducer, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atoll.clock import RealClock
from atoll.codec.base import Packet
from atoll.errors import GroupError, WireError
from atoll.group.base import AllToAllResult
from atoll.group.collectives.collectives import Exchanged
from atoll.group.routes.all_to_all import all_to_all_relay, as_all_to_all_result, upload_of
from atoll.group.routes.direct import DirectGroup, DirectRoute
from atoll.group.routes.hierarchical import reduce_by_sites, site_of
from atoll.group.routes.member_lines import KnownMembers, MemberLines
from atoll.group.routes.relay import REDUCER, RelayedMean, RelayExchange, decode_mean
from atoll.group.routes.requests import AllToAllRequest, ReduceRequest
from atoll.net.member_tls import MemberKey
from atoll.net.sync_link import SyncLink
from atoll.reducer.all_to_all import Outgoing
from atoll.reducer.mean import Share
from atoll.wire.messages import Peer, Registered, RoundPlan

PREPARE_S = 60.0
"""Time limit of connecting before the first round, and of measuring lines."""


class Routes:
    """Runs one member's exchanges on the route that a plan names."""

    def __init__(
        self,
        link: SyncLink,
        *,
        job: str,
        me: str,
        address: str,
        is_lost: Callable[[RoundPlan, str], bool],
    ) -> None:
        """Use the relay, and direct connections if the own numeric address is not empty.

        `is_lost` returns whether the hub reported a member (or the reducer) of a plan as lost.
        """
        self._link, self._me, self._is_lost = link, me, is_lost
        self.upload_s: float | None = None
        """Seconds until the last contribution had left this machine, if known."""
        self._own: MemberKey | None = None
        self._direct = DirectRoute(address=address, job=job, me=me) if address else None

    @property
    def dial(self) -> list[str]:
        """Addresses at which other members reach this one; empty: none."""
        return [self._direct.dial] if self._direct is not None else []

    @property
    def identity(self) -> str:
        """Fingerprint of the own key, by which other members know this one; empty: it has none."""
        if self._direct is not None and self._own is None:
            self._own = MemberKey()
        return self._own.fingerprint if self._own is not None else ""

    def trust(
        self, registered: Registered, *, identities: Callable[[], Mapping[str, str]]
    ) -> MemberLines | None:
        """Connect directly to members that know the job's key, and to no others.

        `identities` asks the hub for the fingerprints of the members' own keys. Returns what makes
        connections with them apart from rounds; None: this member has none.
        """
        key, encrypted = registered.key, registered.encrypted
        if self._direct is None or not key:
            return None
        self._direct.identities, self._direct.first_epoch = identities, registered.first_epoch
        lines = MemberLines(
            key, me=self._me, own=self._own, encrypted=encrypted, known=KnownMembers(identities)
        )
        self._direct.trust(lines)
        return lines

    @property
    def lines(self) -> Mapping[str, tuple[float, float]]:
        """What was measured from other members: round trip in seconds, bytes per second."""
        return self._direct.lines if self._direct is not None else {}

    def prepare(self, peers: Sequence[Peer]) -> None:
        """Begin to connect with the members of a run, in slot order, before its first plan.

        What takes too long is connected in the round.
        """
        if self._direct is not None:
            deadline = RealClock().monotonic() + PREPARE_S
            members = tuple(peer.member for peer in peers)
            epoch = self._direct.first_epoch
            self._direct.prepare(DirectGroup(epoch, members, peers[0].dial[0], deadline))

    def begin(self) -> int:
        """Return the number of a new meeting; the previous one is abandoned."""
        return self._direct.begin() if self._direct is not None else 0

    def exchange(self, request: ReduceRequest) -> Exchanged:
        """Return the mean over the plan's members.

        Raises:
            PeerLost: a member or the reducer was lost.
            EpochChanged: the reducer does not know this epoch.
            DeadlineExceeded: it took longer than the plan allows.
            GroupError: nothing was left to average, or this member's contribution is incompatible.
        """
        route = request.plan.route
        if route == "direct":
            return self._dialled().exchange(request)
        if route == "relay":
            packet = request.codec.encode(request.vector, key=request.key)
            mean = self._via_reducer(request, packet, request.weight, ())
            elements = len(request.vector)
            return decode_mean(mean, elements, sent=mean.sent_bytes, received=mean.received_bytes)
        if route == "hierarchical":
            via_reducer = partial(self._via_reducer, request)
            return reduce_by_sites(
                request, me=self._me, direct=self._direct, via_reducer=via_reducer
            )
        raise WireError(
            "unknown route", given=route, expected="alone, direct, relay or hierarchical"
        )

    def _dialled(self) -> DirectRoute:
        if self._direct is None:
            raise GroupError("this member cannot be dialled", given="route relay", expected="auto")
        return self._direct

    def all_to_all(self, request: AllToAllRequest) -> AllToAllResult:
        """Run an all-to-all; raises as :meth:`exchange`, and PeerRefused for an unusable result.

        The hierarchical route uses the reducer, so that no member sees packets between two others.
        """
        plan, me = request.plan, self._me
        messages = Outgoing.of(me, request.messages, weight=request.weight, members=plan.members)
        if plan.route == "direct":
            found, sent, received = self._dialled().all_to_all(
                plan, messages, serial=request.serial, anew=request.phase == 0
            )
        else:
            answer = self._via_reducer(request, upload_of(messages), request.weight, ())
            found = all_to_all_relay(answer, me=me, members=plan.members)
            sent, received = answer.sent_bytes, answer.received_bytes
        return as_all_to_all_result(
            request.messages, found, me=me, sent_bytes=sent, received_bytes=received
        )

    def _via_reducer(
        self,
        request: ReduceRequest | AllToAllRequest,
        packet: Packet,
        weight: float,
        contributors: Sequence[str],
    ) -> RelayedMean:
        plan, aggregation = request.plan, ""
        if isinstance(request, ReduceRequest):
            aggregation = request.aggregation.spec(request.key)
        exchange = RelayExchange(
            self._link, plan, Share(self._me, packet, weight, tuple(contributors), aggregation),
            phase=request.phase, deadline=RealClock().monotonic() + plan.timeout_s,
            reducer_lost=lambda: self._is_lost(plan, REDUCER),
        )  # fmt: skip
        mean = exchange.run()
        self.upload_s = exchange.upload_s
        return mean

    def needed(self, plan: RoundPlan, *, all_to_all: bool) -> Sequence[str]:
        """Return the members without which this member's exchange cannot end."""
        if plan.route == "hierarchical":
            return (REDUCER,) if all_to_all else (*site_of(plan, self._me)[0], REDUCER)
        return plan.members if plan.route == "direct" else ()

    def drop(self) -> None:
        """Abandon the current exchange; the next direct meeting connects anew."""
        if self._direct is not None:
            self._direct.drop()

    def close(self) -> None:
        """Drop connections to other members. A process that lost a peer exits with `os._exit`."""
        if self._direct is not None:
            self._direct.close()
