"""One member of an in-process group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec, Packet
from atoll.codec.registry import make_codec
from atoll.errors import GroupError, GroupLeft
from atoll.group.aggregation import Aggregation
from atoll.group.base import (
    AllToAllResult,
    Decidable,
    PeerMessage,
    Reduced,
    Resting,
    Work,
    flatten,
    unflatten,
)
from atoll.group.in_process.coordinator import Coordinator
from atoll.group.in_process.exchanges import AttemptExchanges
from atoll.group.in_process.servers import ServerRequest
from atoll.group.period import PeriodReport
from atoll.group.routes.all_to_all import as_all_to_all_result
from atoll.group.routes.allgather_mean import AllgatherMean
from atoll.group.votes import agrees, check_not_left_behind, vote_on
from atoll.reducer.all_to_all import DeliveredMessage, Outgoing
from atoll.reducer.mean import Share, result_digest
from atoll.wire.messages import Lease, Registered, RoundPlan, Sources, Verdict
from atoll.wire.parameter_server_messages import Ask

FINISH_SHARE = 0.6
"""Share of the time to leave in which an open round may still end."""


class MemoryGroup:
    """One member's view of a :class:`MemoryGroups`; see :class:`atoll.group.base.Group`."""

    def __init__(self, coordinator: Coordinator, me: str, committed_round: int = 0) -> None:
        self.me = me
        self.members: tuple[str, ...] = ()
        self.epoch = 0
        self.committed_round = committed_round
        self.stopping = False
        self.leaving = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self.upload_s: float | None = None
        self.aggregation = Aggregation()
        self._coordinator = coordinator
        self._attempt: AttemptExchanges | None = None
        self._exchanges = 0
        """Exchanges begun since the join."""
        self._codecs: list[Codec] = []

    def register(self, *, state: Sequence[str] = ()) -> Registered:
        """Record the member's address for recovery, and return the state of the group."""
        registered = self._coordinator.register(self.me, state)
        self.committed_round, self.stopping = registered.committed_round, registered.stopping
        return registered

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """See :meth:`Group.recover`."""
        sources = self._coordinator.recover(self.me, failed, ready=ready)
        self.committed_round = sources.round
        return sources

    def standing(
        self,
        round_: int,
        *,
        base: str,
        sources: Sequence[str] = (),
        seconds: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """See :meth:`Group.standing`."""
        self._coordinator.stand(self.me, round_, base)

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """See :meth:`Group.leave`."""
        self.leaving = True
        self._coordinator.leave(self.me, reason, patience_s=FINISH_SHARE * timeout_s)

    def announce(self, report: PeriodReport) -> None:
        """Do nothing: a plan is made at once, without a way to a hub."""

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """See :meth:`Group.join`."""
        if self.leaving:
            raise GroupLeft("this member has left the group", given=self.me)
        timeout_s = None
        if deadline is not None:
            timeout_s = max(0.0, deadline - RealClock().monotonic())
        self._attempt = attempt = self._coordinator.join(self.me, report, timeout_s=timeout_s)
        plan, self._exchanges = attempt.plan, 0
        self.members, self.epoch, self.stopping = tuple(plan.members), plan.epoch, plan.stopping
        return plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """See :meth:`Group.reduce`."""
        attempt, number = self._begin()
        shapes = [x.detach() for x in xs]
        if attempt.plan.route == "alone":
            self.aggregation.check_members(1)
            from_me = flatten(xs)
            return Work.start(
                lambda: self._alone(attempt, number, from_me, shapes, weight),
                name=f"reduce-{self.me}",
            )
        if not any(codec is known for known in self._codecs):
            self._codecs.append(codec)
        codec.set_round(attempt.plan.round)
        if codec.needs_allgather:
            plan = attempt.plan
            by = AllgatherMean(self.me, codec, self.aggregation.spec(key), plan.round, shapes)
            given = by.messages(flatten(xs), key=key, members=plan.members)
            return Work.start(
                lambda: by.reduced(self._all_to_all(attempt, number, given, weight)),
                name=f"reduce-{self.me}",
            )
        packet = codec.encode(flatten(xs), key=key)
        share = Share(self.me, packet, weight, aggregation=self.aggregation.spec(key))
        return Work.start(
            lambda: self._exchange(attempt, number, share, shapes), name=f"reduce-{self.me}"
        )

    def _alone(
        self,
        attempt: AttemptExchanges,
        number: int,
        vector: Tensor,
        like: Sequence[Tensor],
        weight: float,
    ) -> Reduced:
        share = Share(self.me, make_codec("fp32").encode(vector, key="alone"), weight or 1.0)
        self._coordinator.contribute(attempt, number, share)
        return Reduced(
            tensors=unflatten(vector, like), contributors=(self.me,), weight=weight,
            sent_bytes=0, received_bytes=0, digest="alone",
        )  # fmt: skip

    def _exchange(
        self, attempt: AttemptExchanges, number: int, share: Share, like: Sequence[Tensor]
    ) -> Reduced:
        mean = self._coordinator.contribute(attempt, number, share)
        vector = make_codec(mean.packet.codec).decode(mean.packet)
        sent, received = len(share.packet.data), len(mean.packet.data)
        self.sent_bytes += sent
        self.received_bytes += received
        return Reduced(
            tensors=unflatten(vector, like), contributors=mean.contributors, weight=mean.weight,
            sent_bytes=sent, received_bytes=received,
            digest=result_digest(mean.packet.data, mean.contributors),
        )  # fmt: skip

    def all_to_all(
        self, messages: Sequence[PeerMessage], *, weight: float = 1.0
    ) -> Work[AllToAllResult]:
        """See :meth:`Group.all_to_all`."""
        attempt, number = self._begin()
        given = list(messages)
        return Work.start(
            lambda: self._all_to_all(attempt, number, given, weight), name=f"all-to-all-{self.me}"
        )

    def _all_to_all(
        self, attempt: AttemptExchanges, number: int, messages: Sequence[PeerMessage], weight: float
    ) -> AllToAllResult:
        gift = Outgoing.of(self.me, messages, weight=weight, members=attempt.plan.members)
        answer = self._coordinator.hand_in(attempt, number, gift)
        found = DeliveredMessage(answer.packets_for(self.me), answer.weights, answer.digest)
        received = sum(len(p.data) for packets in found.packets.values() for p in packets)
        self.sent_bytes += gift.nbytes
        self.received_bytes += received
        return as_all_to_all_result(
            messages, found, me=self.me, sent_bytes=gift.nbytes, received_bytes=received
        )

    def commit(
        self,
        reduced: Decidable | None,
        *,
        ok: bool = True,
        reason: str = "",
        lease: Lease | None = None,
        resting: Resting = nullcontext,
    ) -> Verdict:
        """See :meth:`Group.commit`."""
        attempt = self._joined()
        vote = vote_on(attempt.plan, reduced, ok=ok, reason=reason, lease=lease)
        committed = counted = False
        try:
            with resting():
                verdict = self._coordinator.vote(attempt, self.me, vote)
            committed = agrees(verdict, vote)
            counted = committed and self.me in verdict.contributors
        finally:
            codecs, self._codecs = self._codecs, []
            for codec in codecs:
                codec.finish(committed=counted)
        check_not_left_behind(verdict, vote)
        if committed:
            self.committed_round = verdict.round + 1
        return verdict

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """See :meth:`Group.ask_server`."""

        def request() -> ServerRequest:
            found = self._coordinator.servers.ask(self.me, server, ask, packet)
            self.sent_bytes += found.sent_bytes
            self.received_bytes += found.received_bytes
            return found

        return Work.start(request, name=f"ask-{self.me}")

    def close(self) -> None:
        """Leave at once."""
        self._coordinator.leave(self.me, "it has closed its group", patience_s=0.0)

    def _begin(self) -> tuple[AttemptExchanges, int]:
        attempt, number = self._joined(), self._exchanges
        self._exchanges += 1
        return attempt, number

    def _joined(self) -> AttemptExchanges:
        if self._attempt is None:
            raise GroupError("reduce and commit come after join", given="no plan")
        return self._attempt
