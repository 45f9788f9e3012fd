"""A member's group over the hub: joins and verdicts by message, tensors direct or relayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec, Packet
from atoll.errors import (
    AtollError,
    EpochChanged,
    GroupError,
    GroupLeft,
    PeerLost,
)
from atoll.group.aggregation import Aggregation
from atoll.group.announced import AnnouncedJoin
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
from atoll.group.hub_requests import HubRequests
from atoll.group.in_process.servers import ServerRequest
from atoll.group.parameter_server_client import ParameterServerCalls
from atoll.group.period import PeriodReport
from atoll.group.reachable import ReachablePeers
from atoll.group.routes.allgather_mean import AllgatherMean
from atoll.group.routes.exchange_queue import ExchangeQueue, QueuedExchange
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import own_address
from atoll.group.routes.requests import AllToAllRequest, ReduceRequest
from atoll.group.routes.routes import Routes
from atoll.group.single import own_packets, own_values
from atoll.group.votes import agrees, check_not_left_behind, vote_on
from atoll.net.line_use import LineUse
from atoll.net.sync_link import SyncLink
from atoll.wire.messages import (
    Done,
    Lease,
    Leaving,
    MemberLost,
    Message,
    Recover,
    Register,
    Registered,
    Roster,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Sources,
    Standing,
    Stopping,
    Verdict,
)
from atoll.wire.parameter_server_messages import Ask

log = logging.getLogger(__name__)

FINISH_SHARE = 0.6
"""Share of the time to leave in which an open round may still end."""
QUESTIONS = (Roster, RoundJoin, RoundVote, Recover, Standing)
"""Requests that a member which has left no longer sends."""
KEPT_BYTES = 64 << 20
"""Larger vectors are not kept between rounds: their memory costs more than mapping fresh pages."""


class HubGroup:
    """See :class:`atoll.group.base.Group`.

    Used from one thread, except :meth:`leave`, which is thread-safe; exchanges run on other
    threads, one at a time.
    """

    def __init__(
        self, link: SyncLink, *, job: str, member: str, hub: str, route: str = "auto",
        patience_s: float = 600.0, line: LineUse | None = None,
    ) -> None:  # fmt: skip
        """Create the group of one member, with `route` `auto`, `direct` or `relay`.

        Exchanges use the `line`. Peers connect to the local address of the route to `hub`, which
        may be away `patience_s`.
        """
        self.me = member
        self.members: tuple[str, ...] = ()
        self.epoch = 0
        self.committed_round = 0
        self.stopping = False
        self.save_round = -1
        """Round after which the hub last asked for a checkpoint, counted as `committed_round`."""
        self.leaving = False
        self.aggregation = Aggregation()
        self.registered: Registered | None = None
        self.lines: MemberLines | None = None
        """Makes connections with other members apart from rounds; None: only the hub is used."""
        self._link, self._job = link, job
        self._requests = HubRequests(link, patience_s=patience_s)
        self._routes = Routes(
            link, job=job, me=member, address=own_address(hub) if route != "relay" else "",
            is_lost=self._is_lost,
        )  # fmt: skip
        self._peers = ReachablePeers(self._requests, me=member)
        self._plan: RoundPlan | None = None
        self._announced = AnnouncedJoin()
        self._codecs: list[Codec] = []
        """Codecs of the current plan's reduces, each once."""
        # The link's thread (`_on_notice`) and `leave` use `_plan`, `_lost` and `leaving`, too.
        self._lock = threading.Lock()
        self._lost: set[tuple[int, str]] = set()
        self._gave = False
        """Whether this member contributed a weight above 0 to the current plan."""
        self._nbytes = 0
        """Of what this member has put into it, encoded."""
        self._calls = ParameterServerCalls(link, job=job)
        self._exchanges = ExchangeQueue(
            self._routes, me=member, is_lost=self._is_lost,
            trouble=partial(self._requests.tell, me=member), line=line or LineUse(),
        )  # fmt: skip
        self._decided = threading.Event()
        """Set while no attempt with this member is open."""
        self._decided.set()
        self._scratch: Tensor | None = None
        link.on_notice(self._on_notice)

    # ----------------------------------------------------------------- membership

    @property
    def sent_bytes(self) -> int:
        """See :attr:`Group.sent_bytes`."""
        return self._exchanges.sent_bytes + self._calls.sent_bytes

    @property
    def received_bytes(self) -> int:
        """See :attr:`Group.received_bytes`."""
        return self._exchanges.received_bytes + self._calls.received_bytes

    @property
    def upload_s(self) -> float | None:
        """See :attr:`Group.upload_s`."""
        return self._routes.upload_s

    def register(self, *, state: Sequence[str] = ()) -> Registered:
        """Enter the job with the host:port where this member serves the committed state."""
        routes, identities = self._routes, self._requests.identities
        ask = Register(dial=routes.dial, state=list(state), identity=routes.identity)
        reply = self._requests.ask(ask, Registered)
        self.registered = reply
        self.lines = routes.trust(reply, identities=identities)
        self.committed_round, self.stopping = reply.committed_round, reply.stopping
        if reply.first_epoch and self.lines is not None:
            self._peers.look_early(reply.num_slots, then=routes.prepare)
        return reply

    def recover(
        self, failed: Sequence[str] = (), *, ready: bool = True, needs_s: float = 0.0
    ) -> Sources:
        """See :meth:`Group.recover`; `needs_s`: seconds of a fetch that came too late."""
        question = Recover(failed=list(failed), ready=ready, needs_s=needs_s)
        sources = self._requests.ask(question, Sources)
        self.committed_round = sources.round
        self._announced.forget()
        self._peers.forget()
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
        standing = Standing(
            round=round_, base=base, sources=list(sources), seconds=seconds, nbytes=nbytes
        )
        self._requests.ask(standing, Done)

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """See :meth:`Group.leave`."""
        deadline = RealClock().monotonic() + timeout_s
        left = GroupLeft("this member leaves its group", given=reason or self.me)
        with self._lock:
            again, self.leaving = self.leaving, True
        # Only new rounds are prevented: an open one, which may just connect, can be committed.
        self._requests.end(left, RoundJoin)
        self._decided.wait(FINISH_SHARE * timeout_s)
        self._requests.end(left, *QUESTIONS)
        self._exchanges.fail(left)
        self._calls.fail(left)
        if not again:
            try:
                self._requests.ask(Leaving(reason=reason), Done, deadline=deadline)
            except AtollError as error:  # the hub will notice that the connection ends
                log.warning("%s could not report to the hub that it leaves: %s", self.me, error)

    # --------------------------------------------------------------------- rounds

    def announce(self, report: PeriodReport) -> None:
        """See :meth:`Group.announce`."""
        self._announced.ask(report.round, lambda: self._plan_for(report, None))

    def _plan_for(self, report: PeriodReport, deadline: float | None) -> RoundPlan:
        request = report.as_join(reachable=self._look_around(), lines=self._routes.lines)
        return self._requests.ask(request, RoundPlan, deadline=deadline)

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """See :meth:`Group.join`."""
        plan = self._announced.take(report, deadline=deadline) or self._plan_for(report, deadline)
        if self.me not in plan.members:
            raise GroupError(
                "the plan of this round is without this member",
                given=self.me, expected=", ".join(plan.members),
            )  # fmt: skip
        # In one step: `leave` must either prevent this attempt or see that it is open.
        with self._lock:
            self._lost = {entry for entry in self._lost if entry[0] >= plan.epoch}
            self._plan, self._gave, self._nbytes = plan, False, 0
            self._exchanges.renew()
            if self.leaving:
                raise GroupLeft("this member leaves its group", given=self.me)
            self._decided.clear()
        self.members, self.epoch, self.stopping = tuple(plan.members), plan.epoch, plan.stopping
        if plan.saving:
            self.save_round = plan.round + 1
        return plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """See :meth:`Group.reduce`."""
        plan = self._joined()
        aggregation = self.aggregation.planned(plan.collective, codec=codec.spec)
        if plan.route == "alone":
            aggregation.check_members(1)
            return Work.of(own_values(xs, me=self.me, weight=weight))
        self._gave |= weight > 0
        if not any(codec is known for known in self._codecs):
            self._codecs.append(codec)
        codec.set_round(plan.round)
        self._nbytes += codec.nbytes(sum(x.numel() for x in xs))
        vector, like = self._flat(xs), [x.detach() for x in xs]

        def mean(turn: QueuedExchange) -> Reduced:
            out = self._routes.exchange(
                ReduceRequest(
                    plan=plan, vector=vector, codec=codec, weight=weight, key=key,
                    aggregation=aggregation, serial=turn.serial, phase=turn.phase,
                )
            )  # fmt: skip
            return Reduced(
                tensors=unflatten(out.vector, like), contributors=out.contributors,
                weight=out.weight, sent_bytes=out.sent_bytes, received_bytes=out.received_bytes,
                digest=out.digest,
            )  # fmt: skip

        def gathered(turn: QueuedExchange) -> Reduced:
            by = AllgatherMean(self.me, codec, aggregation.spec(key), plan.round, like)
            messages = by.messages(vector, key=key, members=plan.members)
            return by.reduced(self._all_to_all(plan, messages, weight, turn))

        exchange = gathered if codec.needs_allgather else mean
        return self._exchanges.begin(plan, exchange, all_to_all=codec.needs_allgather)

    def all_to_all(
        self, messages: Sequence[PeerMessage], *, weight: float = 1.0
    ) -> Work[AllToAllResult]:
        """See :meth:`Group.all_to_all`."""
        plan, given = self._joined(), list(messages)
        if plan.route == "alone":
            return Work.of(own_packets(given, me=self.me, weight=weight))

        self._nbytes += sum(len(message.packet.data) for message in given)
        return self._exchanges.begin(
            plan, lambda turn: self._all_to_all(plan, given, weight, turn), all_to_all=True
        )

    def _all_to_all(
        self, plan: RoundPlan, messages: Sequence[PeerMessage], weight: float, turn: QueuedExchange
    ) -> AllToAllResult:
        return self._routes.all_to_all(
            AllToAllRequest(
                plan=plan, messages=messages, weight=weight, serial=turn.serial, phase=turn.phase
            )
        )

    def _joined(self) -> RoundPlan:
        if self._plan is None:
            raise GroupError("reduce, all_to_all and commit come after join", given="no plan")
        return self._plan

    def _flat(self, xs: Sequence[Tensor]) -> Tensor:
        """Flatten into a reused vector, or a new one while an earlier exchange uses that."""
        if not self._exchanges.idle:
            self._scratch = None
        self._scratch = flatten(xs, out=self._scratch)
        return self._scratch

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """See :meth:`Group.ask_server`."""
        return self._calls.ask(ask, packet, server=server)

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
        vote = vote_on(
            self._joined(), reduced, ok=ok, reason=reason, lease=lease,
            report=self._announced.report, nbytes=self._nbytes,
        )  # fmt: skip
        committed = counted = False
        try:
            with resting():
                verdict = self._requests.ask(vote, Verdict)
            committed = agrees(verdict, vote)
            counted = committed and self.me in verdict.contributors
            if committed and not counted and self._gave:
                log.warning("the others left this member's values out of round %s", vote.round)
        finally:
            self._settle(committed=committed, counted=counted)
        check_not_left_behind(verdict, vote)
        if committed:
            self.committed_round = verdict.round + 1
        return verdict

    def _settle(self, *, committed: bool, counted: bool) -> None:
        """Commit or roll back the codecs' residuals; reconnect after an abort."""
        codecs, self._codecs = self._codecs, []
        for codec in codecs:
            codec.finish(committed=counted)
        if committed:
            self._exchanges.renew()  # frees the round's result
        else:
            self._routes.drop()
            self._peers.forget()
        if self._scratch is not None and self._scratch.nbytes > KEPT_BYTES:
            self._scratch = None
        self._decided.set()

    # -------------------------------------------------------------------- members

    def _look_around(self) -> list[str]:
        """Return the members that accept connections.

        Empty with a robust aggregation, which needs one place that sees all contributions.
        """
        if not self._routes.dial or self.aggregation.robust:
            return []  # a member that sums a part could falsify it
        return self._peers.look(self.members)

    def _is_lost(self, plan: RoundPlan, member: str) -> bool:
        with self._lock:
            return (plan.epoch, member) in self._lost

    def _on_notice(self, notice: Message) -> None:
        """Process notices that end the current exchange, or the job. Runs on the link's thread."""
        if isinstance(notice, MemberLost) and notice.job == self._job:
            with self._lock:
                self._lost.add((notice.epoch, notice.member))
                plan = self._plan
            if plan is not None and plan.epoch == notice.epoch:
                lost = PeerLost("the hub lost a member", given=notice.member)
                self._exchanges.fail(lost, needed=notice.member)
        elif isinstance(notice, Verdict) and not notice.committed:
            self._announced.aborted(notice.epoch)
            with self._lock:
                plan = self._plan
            if plan is not None and plan.epoch == notice.epoch:
                self._exchanges.fail(EpochChanged("this attempt was aborted", given=notice.reason))
        elif isinstance(notice, Stopping) and notice.job == self._job:
            self.stopping = True

    def close(self) -> None:
        """Close connections to other members; after a lost peer end the process with `os._exit`."""
        self._routes.close()
