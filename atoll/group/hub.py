"""A member's group over the hub: joins and verdicts by message, tensors direct or relayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.codec import Codec
from atoll.errors import (
    AtollError,
    EpochChanged,
    GroupError,
    GroupLeft,
    LeftBehind,
    PeerLost,
    PeerRefused,
)
from atoll.group.alone import own_values
from atoll.group.group import (
    Decidable,
    Parcel,
    Reduced,
    Resting,
    Swapped,
    Work,
    flatten,
    unflatten,
)
from atoll.group.policy import GroupPolicy
from atoll.group.reach import own_address, probe
from atoll.group.routes import Errand, Routes
from atoll.group.talk import Talk
from atoll.net.sync_link import SyncLink
from atoll.wire.messages import (
    Account,
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
    Verdict,
)

log = logging.getLogger(__name__)

FINISH_SHARE = 0.6
"""Share of the time to leave in which a round that is under way may still end."""
EXTRA_S = 5.0
"""How much longer than the plan's time a reduce is waited for: its own error says more."""
QUESTIONS = (Roster, RoundJoin, RoundVote, Recover, Standing)
"""What a member that has left asks no more."""


class HubGroup:
    """See :class:`atoll.group.group.Group`.

    Used from one thread; reduces run on another, and any thread may call :meth:`leave`.
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
        self.sent_bytes = 0
        self.received_bytes = 0
        self.registered: Registered | None = None
        self.seconds = {"join": 0.0, "reduce": 0.0, "commit": 0.0}
        """Seconds of the last join, reduce and commit."""
        self._link, self._job = link, job
        self._talk = Talk(link, patience_s=patience_s)
        self._routes = Routes(
            link, job=job, me=member, address=own_address(hub) if route != "relay" else "",
            is_lost=self._is_lost,
        )  # fmt: skip
        self._reachable: list[str] = []
        self._asked_with: tuple[str, ...] | None = None
        self._plan: RoundPlan | None = None
        self._codec: Codec | None = None
        self._lock = threading.Lock()
        self._lost: set[tuple[int, str]] = set()
        self._work: Work[Reduced] | None = None
        self._work_ended = threading.Event()
        self._decided = threading.Event()
        """No attempt is open that this member takes part in."""
        self._decided.set()
        self._scratch: Tensor | None = None
        link.on_notice(self._on_notice)

    # ----------------------------------------------------------------- membership

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
        with self._lock:
            work = self._work
        if work is not None:
            work.fail(left)
        if not again:
            try:
                self._talk.ask(Leaving(reason=reason), Done, deadline=deadline)
            except AtollError as error:  # it will notice by the end of the connection
                log.warning("the hub was not told that %s leaves: %s", self.me, error)

    # ---------------------------------------------------------------- transaction

    def join(
        self,
        round_: int,
        *,
        base: str,
        tokens: int = 0,
        steps: int = 0,
        busy_s: float = 0.0,
        lease: Lease | None = None,
        account: Account | None = None,
        deadline: float | None = None,
    ) -> RoundPlan:
        """Wait for the plan of a round; see :meth:`Group.join`."""
        began = RealClock().monotonic()
        request = RoundJoin(
            round=round_, base=base, reachable=self._look_around(), tokens=tokens, steps=steps,
            busy_s=busy_s, account=account, lease=lease,
        )  # fmt: skip
        plan = self._talk.ask(request, RoundPlan, deadline=deadline)
        with self._lock:
            self._lost = {entry for entry in self._lost if entry[0] >= plan.epoch}
            self._plan, self._work = plan, None
            if self.leaving:
                raise GroupLeft("this member leaves its group", given=self.me)
            self._decided.clear()
        self.members, self.epoch, self.stopping = tuple(plan.members), plan.epoch, plan.stopping
        if self.me not in plan.members:
            raise GroupError(
                "the plan of this round is without this member",
                given=self.me, expected=", ".join(plan.members),
            )  # fmt: skip
        self.seconds["join"] = RealClock().monotonic() - began
        return plan

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Begin the mean over the plan's members; see :meth:`Group.reduce`."""
        plan = self._plan
        if plan is None:
            raise GroupError("reduce comes after join", given="no plan")
        self._routes.upload_s = None
        if plan.route == "alone":
            return Work.of(own_values(xs, me=self.me, weight=weight))
        self._codec = codec
        errand = Errand(plan, self._flat(xs), codec, weight, key, self._routes.begin())
        like = [x.detach() for x in xs]
        began = RealClock().monotonic()
        work: Work[Reduced] = Work(deadline=began + plan.timeout_s + EXTRA_S)
        ended = threading.Event()
        with self._lock:
            self._work, self._work_ended = work, ended

        def body() -> None:
            try:
                reduced = self._exchange(errand, like)
                self.seconds["reduce"] = RealClock().monotonic() - began
                work.finish(reduced)
            except BaseException as error:  # whatever it is belongs to the one who waits
                work.fail(error)
                self._tell(plan, error)
            finally:
                ended.set()

        threading.Thread(target=body, name=f"reduce-{self.me}", daemon=True).start()
        if any(self._is_lost(plan, member) for member in self._routes.needed(plan)):
            work.fail(PeerLost("a member was lost before the exchange began"))
        return work

    def _flat(self, xs: Sequence[Tensor]) -> Tensor:
        """Return the values in a vector that is used again, unless an earlier reduce has it."""
        if not self._work_ended.is_set():
            self._scratch = None
        self._scratch = flatten(xs, out=self._scratch)
        return self._scratch

    def _exchange(self, errand: Errand, like: Sequence[Tensor]) -> Reduced:
        """Move the tensors on the plan's route."""
        out = self._routes.exchange(errand)
        self.sent_bytes += out.sent_bytes
        self.received_bytes += out.received_bytes
        return Reduced(
            tensors=unflatten(out.vector, like), contributors=out.contributors, weight=out.weight,
            sent_bytes=out.sent_bytes, received_bytes=out.received_bytes, digest=out.digest,
        )  # fmt: skip

    def _tell(self, plan: RoundPlan, error: BaseException) -> None:
        """Let people know when what others sent is of no use."""
        if isinstance(error, PeerRefused):
            fields = {"member": self.me, "round": str(plan.round), "route": plan.route}
            with suppress(AtollError):
                self._link.notify(Event(kind="result-refused", text=str(error), fields=fields))

    def swap(self, parcels: Sequence[Parcel], *, weight: float = 1.0) -> Work[Swapped]:
        """Begin to give packets to members; see :meth:`Group.swap`."""
        raise NotImplementedError

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
        plan = self._plan
        if plan is None:
            raise GroupError("commit comes after join", given="no plan")
        began = RealClock().monotonic()
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
        finally:
            self._settle(committed=committed, counted=counted)
        if verdict.committed and not committed:
            raise LeftBehind(
                "the group committed a result that this member does not have",
                given=vote.digest or "no result", expected=verdict.digest,
            )  # fmt: skip
        if committed:
            self.committed_round = verdict.round + 1
        self.seconds["commit"] = RealClock().monotonic() - began
        return verdict

    def _settle(self, *, committed: bool, counted: bool) -> None:
        """Keep or roll back what the codec remembers; after an abort connect anew.

        A contribution that was left out of the mean is still owed: its residual is rolled back too.
        """
        codec, self._codec = self._codec, None
        if codec is not None:
            codec.settle(committed=counted)
        if not committed:
            self._routes.drop()
            self._asked_with = None
        self._decided.set()

    # -------------------------------------------------------------------- members

    def _look_around(self) -> list[str]:
        """Return the members that can be dialled; asks only when others are present than before."""
        if not self._routes.dial:
            return []
        if self._asked_with != self.members:
            peers = self._talk.ask(Roster(), RosterReply).peers
            self._reachable = probe({p.member: p.dial for p in peers if p.member != self.me})
            self._asked_with = self.members
        return self._reachable

    def _is_lost(self, plan: RoundPlan, member: str) -> bool:
        with self._lock:
            return (plan.epoch, member) in self._lost

    def _on_notice(self, notice: Message) -> None:
        """Note what ends the reduce under way: a loss, an abort. On the link's thread."""
        if isinstance(notice, MemberLost) and notice.job == self._job:
            with self._lock:
                self._lost.add((notice.epoch, notice.member))
                work, plan = self._work, self._plan
            if work is None or plan is None or plan.epoch != notice.epoch:
                return
            if notice.member in self._routes.needed(plan):
                work.fail(PeerLost("the hub lost a member", given=notice.member))
        elif isinstance(notice, Verdict) and not notice.committed:
            with self._lock:
                work, plan = self._work, self._plan
            if work is not None and plan is not None and plan.epoch == notice.epoch:
                work.fail(EpochChanged("this attempt was aborted", given=notice.reason))

    def close(self) -> None:
        """Drop connections to other members; the link stays its owner's.

        After a lost peer a process should end with `os._exit`: Gloo's threads cannot be joined.
        """
        self._routes.close()
