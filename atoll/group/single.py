"""A group of one, without a hub, for scripts on a single machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import GroupLeft, LeftBehind
from atoll.group.aggregation import Aggregation
from atoll.group.base import AllToAllResult, Decidable, PeerMessage, Reduced, Resting, Work
from atoll.group.in_process.servers import LocalServers, ServerRequest
from atoll.group.period import PeriodReport
from atoll.wire.messages import Lease, RoundPlan, Sources, Verdict
from atoll.wire.parameter_server_messages import Ask

ALONE_DIGEST = "alone"
"""Digest of a result that never left its member."""


class SingleGroup:
    """One member; `reduce` returns its own values exactly, `commit` always commits."""

    def __init__(self, *, me: str = "w0", committed_round: int = 0) -> None:
        self.me = me
        self.members: tuple[str, ...] = (me,)
        self.epoch = 0
        self.committed_round = committed_round
        self.stopping = False
        self.leaving = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self.upload_s: float | None = None
        self.aggregation = Aggregation()
        self._servers = LocalServers()

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return no donors: there are no other members."""
        return Sources(round=self.committed_round)

    def standing(
        self,
        round_: int,
        *,
        base: str,
        sources: Sequence[str] = (),
        seconds: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """Do nothing: there are no other members."""

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """Let every later join raise GroupLeft."""
        self.leaving = True

    def announce(self, report: PeriodReport) -> None:
        """Do nothing: a plan is made at once, without a way to a hub."""

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """Return the plan of a round of one; see :meth:`Group.join`."""
        if self.leaving:
            raise GroupLeft("this member has left", given=self.me)
        if report.round != self.committed_round:
            raise LeftBehind(
                "this is not the next round",
                given=f"round {report.round}",
                expected=f"committed round {self.committed_round}",
            )
        self.epoch += 1
        return RoundPlan(
            job="", round=report.round, epoch=self.epoch, members=[self.me], route="alone",
            stopping=self.stopping,
        )  # fmt: skip

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Return float32 copies of the values; the codec is not used."""
        self.aggregation.check_members(1)
        return Work.of(own_values(xs, me=self.me, weight=weight))

    def all_to_all(
        self, messages: Sequence[PeerMessage], *, weight: float = 1.0
    ) -> Work[AllToAllResult]:
        """Return the packets addressed to this member."""
        return Work.of(own_packets(messages, me=self.me, weight=weight))

    def commit(
        self,
        reduced: Decidable | None,
        *,
        ok: bool = True,
        reason: str = "",
        lease: Lease | None = None,
        resting: Resting = nullcontext,
    ) -> Verdict:
        """Commit if there is a result; the member keeps its lease."""
        committed = ok and reduced is not None
        verdict = Verdict(
            round=self.committed_round, epoch=self.epoch, committed=committed, reason=reason,
            digest=ALONE_DIGEST, contributors=[self.me] if committed else [],
            leases={self.me: lease} if committed and lease is not None else {}, delay=1,
        )  # fmt: skip
        self.committed_round += committed
        return verdict

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """See :meth:`Group.ask_server`."""
        return Work.of(self._servers.ask(self.me, server, ask, packet))

    def close(self) -> None:
        """Do nothing."""


def own_values(xs: Sequence[Tensor], *, me: str, weight: float) -> Reduced:
    """Return the mean over one member: float32 copies of its values."""
    tensors = [x.detach().float().clone() for x in xs]
    return Reduced(
        tensors=tensors, contributors=(me,), weight=weight, sent_bytes=0, received_bytes=0,
        digest=ALONE_DIGEST,
    )  # fmt: skip


def own_packets(messages: Sequence[PeerMessage], *, me: str, weight: float) -> AllToAllResult:
    """Return the packets that a single member sends to itself."""
    packets = [message.packet for message in messages if me in message.to]
    return AllToAllResult(
        packets={me: packets} if packets else {}, weights={me: weight}, sent_bytes=0,
        received_bytes=0, digest=ALONE_DIGEST,
    )  # fmt: skip
