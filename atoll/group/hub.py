"""A member's group over the hub: joins and verdicts by message, tensors direct or relayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec, Packet
from atoll.errors import (
    AtollError,
    EpochChanged,
    GroupError,
    GroupLeft,
    LeftBehind,
    PeerLost,
    PeerRefused,
)
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
from atoll.group.policy import GroupPolicy
from atoll.group.routes.allgather_mean import AllgatherMean
from atoll.group.routes.exchange_queue import ExchangeQueue, QueuedExchange
from atoll.group.routes.rendezvous_store import own_address, probe_peers
from atoll.group.routes.requests import AllToAllRequest, ReduceRequest
from atoll.group.routes.routes import Routes
from atoll.group.single import own_packets, own_values
from atoll.net.sync_link import SyncLink
from atoll.wire.messages import (
    Done,
    Event,
    Lease,
    Leaving,
    MemberLost,
    Message,
    Recover,
    Register,
    Registered,
    Roster,
    RosterReply,
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
"""Share of the time to leave in which a round that is under way may still end."""
QUESTIONS = (Roster, RoundJoin, RoundVote, Recover, Standing)
"""What a member that has left asks no more."""
KEPT_BYTES = 64 << 20
"""A larger vector is not kept from one round to the next: memory counts for more than its pages."""


class HubGroup:
    """See :class:`atoll.group.base.Group`.

    Used from one thread; exchanges run on others, one after the other, and any thread may call
    :meth:`leave`.
    """

    def __init__(
        self,
        link: SyncLink,
        *,
        job: str,
        member: str,
        hub: str,
        route: str = "auto",
        patience_s: float = 600.0,
    ) -> None:
        """Belong to a job.

        Args:
            link: The member's session with the hub.
            job: The job's id.
            member: Own member id.
            hub: The hub's URL; the address used towards it is where other members dial.
            route: `auto`, `direct` or `relay`.
            patience_s: Longest wait for a hub that is away; restarts included.
        """
        self.me = member
        self.members: tuple[str, ...] = ()
        self.epoch = 0
        self.committed_round = 0
        self.stopping = False
        self.leaving = False
        self.policy = GroupPolicy()
        self.registered: Registered | None = None
        self._link, self._job = link, job
        self._talk = HubRequests(link, patience_s=patience_s)
        self._routes = Routes(
            link, job=job, me=member, address=own_address(hub) if route != "relay" else "",
            is_lost=self._is_lost,
        )  # fmt: skip
        self._reachable: list[str] = []
        self._asked_with: tuple[str, ...] | None = None
        self._plan: RoundPlan | None = None
        self._codecs: list[Codec] = []
        """Those of the present plan's reduces, each once."""
        self._lock = threading.Lock()
        self._lost: set[tuple[int, str]] = set()
        self._gave = False
        """Whether this member gave values that weigh something to the present plan."""
        self._calls = ParameterServerCalls(link, job=job)
        self._turns = ExchangeQueue(
            self._routes, me=member, is_lost=self._is_lost, trouble=self._tell
        )
        self._decided = threading.Event()
        """No attempt is open that this member takes part in."""
        self._decided.set()
        self._scratch: Tensor | None = None
        link.on_notice(self._on_notice)

    # ----------------------------------------------------------------- membership

    @property
    def sent_bytes(self) -> int:
        """See :attr:`Group.sent_bytes`."""
        return self._turns.sent_bytes + self._calls.sent_bytes

    @property
    def received_bytes(self) -> int:
        """See :attr:`Group.received_bytes`."""
        return self._turns.received_bytes + self._calls.received_bytes

    @property
    def upload_s(self) -> float | None:
        """See :attr:`Group.upload_s`."""
        return self._routes.upload_s

    def register(self, *, state: Sequence[str] = ()) -> Registered:
        """Enter the job: say where this member can be dialled, learn where the group stands.

        Args:
            state: host:port where it serves the committed state to newcomers.
        """
        reply = self._talk.ask(Register(dial=self._routes.dial, state=list(state)), Registered)
        self.registered = reply
        self.committed_round, self.stopping = reply.committed_round, reply.stopping
        return reply

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return who has the committed state; see :meth:`Group.recover`."""
        sources = self._talk.ask(Recover(failed=list(failed), ready=ready), Sources)
        self.committed_round = sources.round
        self._asked_with = None
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
        """Tell that this member holds the committed state; see :meth:`Group.standing`."""
        told = Standing(
            round=round_, base=base, sources=list(sources), seconds=seconds, nbytes=nbytes
        )
        self._talk.ask(told, Done)

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """Leave for good; see :meth:`Group.leave`."""
        deadline = RealClock().monotonic() + timeout_s
        left = GroupLeft("this member leaves its group", given=reason or self.me)
        with self._lock:
            again, self.leaving = self.leaving, True
        self._talk.end(left, RoundJoin, Roster)
        self._decided.wait(FINISH_SHARE * timeout_s)
        self._talk.end(left, *QUESTIONS)
        self._turns.fail(left)
        self._calls.fail(left)
        if not again:
            try:
                self._talk.ask(Leaving(reason=reason), Done, deadline=deadline)
            except AtollError as error:  # it will notice by the end of the connection
                log.warning("the hub was not told that %s leaves: %s", self.me, error)

    # ---------------------------------------------------------------- transaction

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """Wait for the plan of a round; see :meth:`Group.join`."""
        request = report.as_join(reachable=self._look_around())
        plan = self._talk.ask(request, RoundPlan, deadline=deadline)
        with self._lock:
            self._lost = {entry for entry in self._lost if entry[0] >= plan.epoch}
            self._plan, self._gave = plan, False
            self._turns.renew()
            if self.leaving:
                raise GroupLeft("this member leaves its group", given=self.me)
            self._decided.clear()
        self.members, self.epoch, self.stopping = tuple(plan.members), plan.epoch, plan.stopping
        if self.me not in plan.members:
            raise GroupError(
                "the plan of this round is without this member",
                given=self.me, expected=", ".join(plan.members),
            )  # fmt: skip
        return plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Begin the mean over the plan's members; see :meth:`Group.reduce`."""
        plan = self._joined()
        policy = self.policy
        if plan.route == "alone":
            policy.check_members(1)
            return Work.of(own_values(xs, me=self.me, weight=weight))
        self._gave |= weight > 0
        if not any(codec is known for known in self._codecs):
            self._codecs.append(codec)
        codec.set_round(plan.round)
        vector, like = self._flat(xs), [x.detach() for x in xs]

        def mean(turn: QueuedExchange) -> Reduced:
            out = self._routes.exchange(
                ReduceRequest(
                    plan=plan, vector=vector, codec=codec, weight=weight, key=key, policy=policy,
                    serial=turn.serial, phase=turn.phase,
                )
            )  # fmt: skip
            return Reduced(
                tensors=unflatten(out.vector, like), contributors=out.contributors,
                weight=out.weight, sent_bytes=out.sent_bytes, received_bytes=out.received_bytes,
                digest=out.digest,
            )  # fmt: skip

        def gathered(turn: QueuedExchange) -> Reduced:
            by = AllgatherMean(self.me, codec, policy.spec(key), plan.round, like)
            parcels = by.parcels(vector, key=key, members=plan.members)
            return by.reduced(self._all_to_all(plan, parcels, weight, turn))

        exchange = gathered if codec.needs_allgather else mean
        return self._turns.begin(plan, exchange, swaps=codec.needs_allgather)

    def swap(self, parcels: Sequence[PeerMessage], *, weight: float = 1.0) -> Work[AllToAllResult]:
        """Begin to give packets to members; see :meth:`Group.swap`."""
        plan, given = self._joined(), list(parcels)
        if plan.route == "alone":
            return Work.of(own_packets(given, me=self.me, weight=weight))

        return self._turns.begin(
            plan, lambda turn: self._all_to_all(plan, given, weight, turn), swaps=True
        )

    def _all_to_all(
        self, plan: RoundPlan, parcels: Sequence[PeerMessage], weight: float, turn: QueuedExchange
    ) -> AllToAllResult:
        return self._routes.swap(
            AllToAllRequest(
                plan=plan, parcels=parcels, weight=weight, serial=turn.serial, phase=turn.phase
            )
        )

    def _joined(self) -> RoundPlan:
        if self._plan is None:
            raise GroupError("reduce, swap and commit come after join", given="no plan")
        return self._plan

    def _flat(self, xs: Sequence[Tensor]) -> Tensor:
        """Return the values in a vector that is used again, unless an earlier exchange has it."""
        if not self._turns.idle:
            self._scratch = None
        self._scratch = flatten(xs, out=self._scratch)
        return self._scratch

    def _tell(self, plan: RoundPlan, error: BaseException) -> None:
        """Let people know when what others sent is of no use."""
        if isinstance(error, PeerRefused):
            fields = {"member": self.me, "round": str(plan.round), "route": plan.route}
            with suppress(AtollError):
                self._link.notify(Event(kind="result-refused", text=str(error), fields=fields))

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """Ask a parameter server over the relay; see :meth:`Group.ask_server`."""
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
        """Vote and wait for the verdict; see :meth:`Group.commit`."""
        plan = self._joined()
        ok = ok and reduced is not None
        vote = RoundVote(
            round=plan.round, epoch=plan.epoch, ok=ok, reason="" if ok else reason or "no result",
            digest=reduced.digest if reduced is not None else "",
            contributors=list(reduced.contributors) if reduced is not None else [],
            lease=lease,
        )  # fmt: skip
        committed = counted = False
        try:
            with resting():
                verdict = self._talk.ask(vote, Verdict)
            committed = verdict.committed and ok and verdict.digest == vote.digest
            counted = committed and self.me in verdict.contributors
            if committed and not counted and self._gave:
                log.warning("the others left this member's values out of round %s", plan.round)
        finally:
            self._settle(committed=committed, counted=counted)
        if verdict.committed and not committed:
            raise LeftBehind(
                "the group committed a result that this member does not have",
                given=vote.digest or "no result", expected=verdict.digest,
            )  # fmt: skip
        if committed:
            self.committed_round = verdict.round + 1
        return verdict

    def _settle(self, *, committed: bool, counted: bool) -> None:
        """Keep or roll back the codec's residual; reconnect after an abort."""
        codecs, self._codecs = self._codecs, []
        for codec in codecs:
            codec.finish(committed=counted)
        if committed:
            self._turns.renew()  # it would keep the round's result until the next one
        else:
            self._routes.drop()
            self._asked_with = None
        if self._scratch is not None and self._scratch.nbytes > KEPT_BYTES:
            self._scratch = None
        self._decided.set()

    # -------------------------------------------------------------------- members

    def _look_around(self) -> list[str]:
        """Return the members that can be dialled; asks only when others are present than before.

        None where values are looked at one by one: one place has to see all of them.
        """
        if not self._routes.dial or self.policy.robust:
            return []  # a member that sums a part could lie about it
        if self._asked_with != self.members:
            peers = self._talk.ask(Roster(), RosterReply).peers
            self._reachable = probe_peers({p.member: p.dial for p in peers if p.member != self.me})
            self._asked_with = self.members
        return self._reachable

    def _is_lost(self, plan: RoundPlan, member: str) -> bool:
        with self._lock:
            return (plan.epoch, member) in self._lost

    def _on_notice(self, notice: Message) -> None:
        """Note what ends the reduce under way, or the job. On the link's thread."""
        if isinstance(notice, MemberLost) and notice.job == self._job:
            with self._lock:
                self._lost.add((notice.epoch, notice.member))
                plan = self._plan
            if plan is not None and plan.epoch == notice.epoch:
                lost = PeerLost("the hub lost a member", given=notice.member)
                self._turns.fail(lost, needed=notice.member)
        elif isinstance(notice, Verdict) and not notice.committed:
            with self._lock:
                plan = self._plan
            if plan is not None and plan.epoch == notice.epoch:
                self._turns.fail(EpochChanged("this attempt was aborted", given=notice.reason))
        elif isinstance(notice, Stopping) and notice.job == self._job:
            self.stopping = True

    def close(self) -> None:
        """Close connections to other members; after a lost peer end the process with `os._exit`."""
        self._routes.close()
