"""One member's ways to meet the others: directly, through the hub and the reducer, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec, Packet
from atoll.errors import GroupError, WireError
from atoll.group.base import AllToAllResult, PeerMessage
from atoll.group.collectives.collectives import Exchanged
from atoll.group.policy import GroupPolicy
from atoll.group.routes.all_to_all import all_to_all_relay, as_all_to_all_result, upload_of
from atoll.group.routes.direct import DirectRoute
from atoll.group.routes.hierarchical import decoded, reduce_by_sites, site_of
from atoll.group.routes.relay import REDUCER, RelayedMean, RelayExchange
from atoll.net.sync_link import SyncLink
from atoll.reducer.all_to_all import Outgoing
from atoll.wire.messages import RoundPlan


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """What one reduce has to do."""

    plan: RoundPlan
    vector: Tensor
    """Own values, float32, shape (n,)."""
    codec: Codec
    weight: float
    key: str
    serial: int
    """What :meth:`Routes.begin` returned for its plan."""
    phase: int
    """Number of the exchange within the plan."""
    policy: GroupPolicy
    """What is done with the values."""


@dataclass(frozen=True, slots=True)
class AllToAllRequest:
    """What one swap has to do."""

    plan: RoundPlan
    parcels: Sequence[PeerMessage]
    weight: float
    serial: int
    """What :meth:`Routes.begin` returned for its plan."""
    phase: int = 0
    """Number of the exchange within the plan."""


class Routes:
    """Moves the tensors of one member on whatever route a plan names."""

    def __init__(
        self,
        link: SyncLink,
        *,
        job: str,
        me: str,
        address: str,
        is_lost: Callable[[RoundPlan, str], bool],
    ) -> None:
        """Be ready for the relay, and for direct meetings at `address` if it is not empty.

        Args:
            link: The member's session with the hub.
            job: Names the keys in the store.
            me: Own member id.
            address: Own numeric address, as other members dial it; empty: relay only.
            is_lost: Whether the hub said that it lost a member (or the reducer) of a plan.
        """
        self._link, self._me, self._is_lost = link, me, is_lost
        self.upload_s: float | None = None
        """How long the own contribution to the last exchange was on its way out, if known."""
        self._direct = DirectRoute(address=address, job=job, me=me) if address else None

    @property
    def dial(self) -> list[str]:
        """Where other members can reach this one; empty: nowhere."""
        return [self._direct.dial] if self._direct is not None else []

    def begin(self) -> int:
        """Return the number of a new meeting; one that is still under way is given up."""
        return self._direct.begin() if self._direct is not None else 0

    def exchange(self, errand: ReduceRequest) -> Exchanged:
        """Return the mean over the plan's members; blocks until it is there.

        Raises:
            PeerLost: a member or the reducer was lost.
            EpochChanged: the reducer does not know this epoch.
            DeadlineExceeded: it took longer than the plan allows.
            GroupError: nothing was left to average, or this member does not fit the others.
        """
        route = errand.plan.route
        if route == "direct":
            return self._by_dialling(errand)
        if route == "relay":
            return self._by_relay(errand)
        if route == "hierarchical":
            return self._by_sites(errand)
        raise WireError(
            "unknown route", given=route, expected="alone, direct, relay or hierarchical"
        )

    def _by_dialling(self, errand: ReduceRequest) -> Exchanged:
        if self._direct is None:
            raise _not_dialled()
        return self._direct.exchange(
            errand.plan, errand.vector, serial=errand.serial, codec=errand.codec,
            weight=errand.weight, key=errand.key, policy=errand.policy, anew=errand.phase == 0,
        )  # fmt: skip

    def _by_relay(self, errand: ReduceRequest) -> Exchanged:
        plan, packet = errand.plan, errand.codec.encode(errand.vector, key=errand.key)
        mean = self._upstairs(
            plan, errand.phase, errand.policy.spec(errand.key), packet, errand.weight, ()
        )
        elements = len(errand.vector)
        return decoded(mean, elements, sent=mean.sent_bytes, received=mean.received_bytes)

    def _by_sites(self, errand: ReduceRequest) -> Exchanged:
        return reduce_by_sites(
            errand.plan, errand.vector, me=self._me, direct=self._direct,
            serial=errand.serial,
            upstairs=partial(
                self._upstairs, errand.plan, errand.phase, errand.policy.spec(errand.key)
            ),
            codec=errand.codec, weight=errand.weight, key=errand.key,
        )  # fmt: skip

    def swap(self, errand: AllToAllRequest) -> AllToAllResult:
        """Return what the plan's members have for this one; blocks until it is there.

        On the hierarchical route everybody goes through the reducer: what two members have for each
        other is nobody else's business.

        Raises:
            PeerLost: a member or the reducer was lost.
            EpochChanged: the reducer does not know this epoch.
            DeadlineExceeded: it took longer than the plan allows.
            PeerRefused: what came is of no use.
        """
        plan, me = errand.plan, self._me
        gift = Outgoing.of(me, errand.parcels, weight=errand.weight, members=plan.members)
        if plan.route == "direct":
            if self._direct is None:
                raise _not_dialled()
            found, sent, received = self._direct.swap(
                plan, gift, serial=errand.serial, anew=errand.phase == 0
            )
        else:
            answer = self._upstairs(plan, errand.phase, "", upload_of(gift), errand.weight, ())
            found = all_to_all_relay(answer, me=me, members=plan.members)
            sent, received = answer.sent_bytes, answer.received_bytes
        return as_all_to_all_result(
            errand.parcels, found, me=me, sent_bytes=sent, received_bytes=received
        )

    def _upstairs(
        self,
        plan: RoundPlan,
        phase: int,
        policy: str,
        packet: Packet,
        weight: float,
        contributors: Sequence[str],
    ) -> RelayedMean:
        """Send a packet to the reducer and return the mean, or what the others had."""
        exchange = RelayExchange(
            self._link, plan, packet, weight=weight, contributors=contributors, phase=phase,
            policy=policy,
            deadline=RealClock().monotonic() + plan.timeout_s,
            reducer_lost=lambda: self._is_lost(plan, REDUCER),
        )  # fmt: skip
        mean = exchange.run()
        self.upload_s = exchange.upload_s
        return mean

    def needed(self, plan: RoundPlan, *, swaps: bool) -> Sequence[str]:
        """Return the members without whom this member's part in an exchange cannot end."""
        if plan.route == "hierarchical":
            return (REDUCER,) if swaps else (*site_of(plan, self._me)[0], REDUCER)
        return plan.members if plan.route == "direct" else ()

    def drop(self) -> None:
        """Give up what is under way; the next direct meeting connects anew."""
        if self._direct is not None:
            self._direct.drop()

    def close(self) -> None:
        """Drop connections to other members. A process that lost a peer ends with `os._exit`."""
        if self._direct is not None:
            self._direct.close()


def _not_dialled() -> GroupError:
    return GroupError("this member cannot be dialled", given="route relay", expected="auto")
