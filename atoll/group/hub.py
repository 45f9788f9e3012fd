"""A member's group over the hub: joins and verdicts by message, tensors direct or relayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.codec import Codec
from atoll.codec.table import make_codec
from atoll.errors import GroupError, LeftBehind, PeerLost, WireError
from atoll.group.alone import own_values
from atoll.group.direct import DirectRoute
from atoll.group.group import Reduced, Work, flatten, unflatten
from atoll.group.reach import own_address, probe
from atoll.group.relay import REDUCER, RelayExchange
from atoll.net.sync_link import SyncLink
from atoll.reducer.mean import result_digest
from atoll.wire.messages import (
    MemberLost,
    Message,
    Register,
    Registered,
    Roster,
    RosterReply,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class _Task:
    """What one reduce has to do."""

    plan: RoundPlan
    vector: Tensor
    like: list[Tensor]
    codec: Codec
    weight: float
    key: str
    serial: int


class HubGroup:
    """See :class:`atoll.group.group.Group`. Used from one thread; reduces run on another."""

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
            patience_s: Longest wait for the hub in a join or a commit; restarts included.
        """
        self.me = member
        self.members: tuple[str, ...] = ()
        self.epoch = 0
        self.committed_round = 0
        self.stopping = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self.registered: Registered | None = None
        self.seconds = {"join": 0.0, "reduce": 0.0, "commit": 0.0}
        """Seconds of the last join, reduce and commit."""
        self._link, self._job, self._patience_s = link, job, patience_s
        self._direct: DirectRoute | None = None
        if route != "relay":
            self._direct = DirectRoute(address=own_address(hub), job=job, me=member)
        self._reachable: list[str] = []
        self._asked_with: tuple[str, ...] | None = None
        self._plan: RoundPlan | None = None
        self._codec: Codec | None = None
        self._lock = threading.Lock()
        self._lost: set[tuple[int, str]] = set()
        self._work: Work[Reduced] | None = None
        self._work_ended = threading.Event()
        self._scratch: Tensor | None = None
        link.on_notice(self._on_notice)

    def register(self) -> Registered:
        """Enter the job: say where this member can be dialled, learn where the group stands."""
        dial = [self._direct.dial] if self._direct is not None else []
        reply = self._ask(Register(dial=dial), Registered)
        self.registered = reply
        self.committed_round, self.stopping = reply.committed_round, reply.stopping
        return reply

    # ---------------------------------------------------------------- transaction

    def join(
        self, round_: int, *, base: str, tokens: int = 0, deadline: float | None = None
    ) -> RoundPlan:
        """Wait for the plan of a round; see :meth:`Group.join`."""
        began = RealClock().monotonic()
        reachable = self._look_around()
        request = RoundJoin(round=round_, base=base, reachable=reachable, tokens=tokens)
        timeout_s = self._patience_s if deadline is None else max(0.0, deadline - began)
        plan = self._ask(request, RoundPlan, timeout_s=timeout_s)
        with self._lock:
            self._lost = {entry for entry in self._lost if entry[0] >= plan.epoch}
        self._plan = plan
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
        if plan.route == "alone":
            return Work.of(own_values(xs, me=self.me, weight=weight))
        self._codec = codec
        serial = self._direct.begin() if self._direct is not None else 0
        task = _Task(plan, self._flat(xs), [x.detach() for x in xs], codec, weight, key, serial)
        # A little longer than the exchange's own deadline, whose error says more.
        began = RealClock().monotonic()
        work: Work[Reduced] = Work(deadline=began + plan.timeout_s + 5.0)
        ended = threading.Event()
        with self._lock:
            self._work, self._work_ended = work, ended

        def body() -> None:
            try:
                reduced = self._exchange(task)
                self.seconds["reduce"] = RealClock().monotonic() - began
                work.finish(reduced)
            except BaseException as error:  # whatever it is belongs to the one who waits
                work.fail(error)
            finally:
                ended.set()

        threading.Thread(target=body, name=f"reduce-{self.me}", daemon=True).start()
        if plan.route == "direct" and any(self._is_lost(plan, m) for m in plan.members):
            work.fail(PeerLost("a member was lost before the exchange began"))
        return work

    def _flat(self, xs: Sequence[Tensor]) -> Tensor:
        """Return the values in a vector that is used again, unless an earlier reduce has it."""
        if self._work is not None and not self._work_ended.is_set():
            self._scratch = None
        self._scratch = flatten(xs, out=self._scratch)
        return self._scratch

    def _exchange(self, task: _Task) -> Reduced:
        """Move the tensors on the plan's route."""
        if task.plan.route == "direct":
            return self._by_dialling(task)
        if task.plan.route == "relay":
            return self._by_relay(task)
        raise WireError("unknown route", given=task.plan.route, expected="alone, direct or relay")

    def _by_dialling(self, task: _Task) -> Reduced:
        if self._direct is None:
            raise GroupError("this member cannot be dialled", given="route relay", expected="auto")
        out = self._direct.exchange(
            task.plan, task.vector, serial=task.serial, codec=task.codec, weight=task.weight,
            key=task.key,
        )  # fmt: skip
        return self._reduced(
            out.vector, task.like, out.contributors, out.weight, out.digest,
            out.sent_bytes, out.received_bytes,
        )  # fmt: skip

    def _by_relay(self, task: _Task) -> Reduced:
        plan, packet = task.plan, task.codec.encode(task.vector, key=task.key)
        exchange = RelayExchange(
            self._link, plan, packet, weight=task.weight,
            deadline=RealClock().monotonic() + plan.timeout_s,
            reducer_lost=lambda: self._is_lost(plan, REDUCER),
        )  # fmt: skip
        mean = exchange.run()
        out = make_codec(mean.packet.codec).decode(mean.packet)
        digest = result_digest(mean.packet.data, mean.contributors)
        return self._reduced(
            out, task.like, mean.contributors, mean.weight, digest,
            mean.sent_bytes, mean.received_bytes,
        )  # fmt: skip

    def _reduced(
        self,
        vector: Tensor,
        like: Sequence[Tensor],
        contributors: tuple[str, ...],
        weight: float,
        digest: str,
        sent_bytes: int,
        received_bytes: int,
    ) -> Reduced:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        return Reduced(
            tensors=unflatten(vector, like), contributors=contributors, weight=weight,
            sent_bytes=sent_bytes, received_bytes=received_bytes, digest=digest,
        )  # fmt: skip

    def commit(self, reduced: Reduced | None, *, ok: bool = True, reason: str = "") -> Verdict:
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
        )  # fmt: skip
        committed = counted = False
        try:
            verdict = self._ask(vote, Verdict)
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
        if not committed and self._direct is not None:
            self._direct.drop()
            self._asked_with = None

    # -------------------------------------------------------------------- members

    def _look_around(self) -> list[str]:
        """Return the members that can be dialled; asks only when others are present than before."""
        if self._direct is None:
            return []
        if self._asked_with != self.members:
            peers = self._ask(Roster(), RosterReply).peers
            self._reachable = probe({p.member: p.dial for p in peers if p.member != self.me})
            self._asked_with = self.members
        return self._reachable

    def _is_lost(self, plan: RoundPlan, member: str) -> bool:
        with self._lock:
            return (plan.epoch, member) in self._lost

    def _on_notice(self, notice: Message) -> None:
        """Note who was lost; called on the link's thread."""
        if not isinstance(notice, MemberLost) or notice.job != self._job:
            return
        with self._lock:
            self._lost.add((notice.epoch, notice.member))
            work, plan = self._work, self._plan
        if plan is None or plan.epoch != notice.epoch or plan.route != "direct":
            return
        if work is not None and notice.member in plan.members:
            work.fail(PeerLost("the hub lost a member", given=notice.member))

    def _ask(self, body: Message, kind: type[M], *, timeout_s: float | None = None) -> M:
        """Return the hub's answer of the kind that belongs to the request."""
        reply = self._link.request(
            body, timeout_s=self._patience_s if timeout_s is None else timeout_s
        )
        if not isinstance(reply, kind):
            raise WireError(
                "the hub gave an answer of another kind",
                given=type(reply).__name__, expected=kind.__name__,
            )  # fmt: skip
        return reply

    def close(self) -> None:
        """Drop connections to other members; the link stays its owner's.

        After a lost peer a process should end with `os._exit`: Gloo's threads cannot be joined.
        """
        if self._direct is not None:
            self._direct.close()
