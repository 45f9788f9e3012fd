"""What strategies know about the other members: join a round, reduce, commit.

A round is a transaction. `join` says who takes part, `reduce` gives every member the same mean,
`commit` asks the hub for one durable verdict: either all members apply the result, or none does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.base import Codec, Packet
from atoll.errors import DeadlineExceeded
from atoll.group.in_process.servers import ServerRequest
from atoll.group.period import PeriodReport
from atoll.group.policy import GroupPolicy
from atoll.reducer.all_to_all import PeerMessage as PeerMessage
from atoll.wire.messages import Lease, RoundPlan, Sources, Verdict
from atoll.wire.parameter_server_messages import Ask

T = TypeVar("T")

Resting = Callable[[], AbstractContextManager[None]]
"""Surrounds a wait, so that others may read the state meanwhile; see `Gate.resting`."""


class Work(Generic[T]):
    """Something under way on another thread, with a bounded wait."""

    def __init__(self, *, deadline: float | None = None) -> None:
        """Make pending work; :meth:`finish` or :meth:`fail` ends it.

        Args:
            deadline: Monotonic time after which every wait gives up; None: no bound of its own.
        """
        self._future: Future[T] = Future()
        self._deadline = deadline

    @classmethod
    def of(cls, value: T) -> Work[T]:
        """Return work that is done already."""
        work: Work[T] = cls()
        work.finish(value)
        return work

    @classmethod
    def start(
        cls, function: Callable[[], T], *, name: str, deadline: float | None = None
    ) -> Work[T]:
        """Run `function` on a daemon thread called `name`; its errors come out of `wait`."""
        work: Work[T] = cls(deadline=deadline)

        def body() -> None:
            try:
                work.finish(function())
            except BaseException as error:  # whatever it is belongs to the one who waits
                work.fail(error)

        threading.Thread(target=body, name=name, daemon=True).start()
        return work

    def finish(self, value: T) -> None:
        """End the work with its value, unless it ended before."""
        try:
            self._future.set_result(value)
        except InvalidStateError:
            return

    def fail(self, error: BaseException) -> None:
        """End the work with an error, unless it ended before."""
        try:
            self._future.set_exception(error)
        except InvalidStateError:
            return

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the value; never a partial or empty one.

        Args:
            timeout_s: Longest wait in seconds; the work's own deadline holds in any case.

        Raises:
            DeadlineExceeded: it did not end in time.
            PeerLost: a member or the reducer went away before its part was complete.
            EpochChanged: the plan was replaced by another.
        """
        left_s = timeout_s
        if self._deadline is not None:
            own_s = max(0.0, self._deadline - RealClock().monotonic())
            left_s = own_s if left_s is None else min(left_s, own_s)
        try:
            return self._future.result(left_s)
        except TimeoutError:
            if self._future.done():
                raise  # the work itself raised TimeoutError
            raise DeadlineExceeded(
                "the group's work did not end in time", given=f"waited {left_s:.1f} s"
            ) from None


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a reduce gave: the same values, bit for bit, on every member."""

    tensors: list[Tensor]
    """Weighted means, float32, in the shapes (and on the devices) of what was given."""
    contributors: tuple[str, ...]
    """Whose values are in the mean, in slot order."""
    weight: float
    """Sum of the weights received; the mean was divided by this."""
    sent_bytes: int
    """Bytes this member sent for it, with headers where they are known."""
    received_bytes: int
    digest: str
    """BLAKE2b of the encoded result and the contributors; members compare it to commit."""


@dataclass(frozen=True, slots=True)
class AllToAllResult:
    """What a swap brought this member."""

    packets: Mapping[str, list[Packet]]
    """Sender -> its packets for this member, in the order in which it gave them; senders are in
    slot order. Who sent this member nothing is left out."""
    weights: Mapping[str, float]
    """Weight of every contributor, in slot order; the same on every member."""
    sent_bytes: int
    """Bytes of the parcels that were for others, with headers where they are known: on the relay
    each once, on the direct route once for every receiver."""
    received_bytes: int
    """Bytes that came from others, likewise."""
    digest: str
    """BLAKE2b over the messages of all members: the same on every member."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Whose parcels were in it, in slot order."""
        return tuple(self.weights)


class Decidable(Protocol):
    """What a round came to, as far as the verdict has to know."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Whose values count."""
        ...

    @property
    def digest(self) -> str:
        """The same on every member that has the same result."""
        ...


class Group(Protocol):
    """The members of a job, as one of them sees them.

    After a join there may be several exchanges, reduces and swaps, in the same order on every
    member; then one commit decides on all of them.
    """

    policy: GroupPolicy
    """Set before the first join, to the same on every member."""

    @property
    def me(self) -> str:
        """Own member id."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the last plan, in slot order."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the last plan."""
        ...

    @property
    def committed_round(self) -> int:
        """Rounds committed so far: the next round to join."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the job ends with the round of the last plan."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called: no further round can be joined."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by all reduces so far."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes received by all reduces so far."""
        ...

    @property
    def upload_s(self) -> float | None:
        """Seconds until the own contribution to the last reduce had left; None: not known."""
        ...

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return who has the committed state, and set `committed_round` to it.

        Rounds wait, a bounded time, for the member that asked. If no member holds the state
        the whole run is set back to its newest checkpoint, and there are no peers.

        Args:
            failed: Members that gave nothing usable in this recovery.
            ready: It can be loaded at once. A member that is still starting and only fetches ahead
                says no, and no round waits for it.
        """
        ...

    def standing(
        self,
        round_: int,
        *,
        base: str,
        sources: Sequence[str] = (),
        seconds: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """Tell that this member has taken over the committed state and stands on it.

        Args:
            round_: Rounds that the state has seen.
            base: Its digest.
            sources: Who gave it: members, or `checkpoint`.
            seconds: How long it took.
            nbytes: What was taken.
        """
        ...

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """Leave for good: no round waits for this member afterwards. From any thread.

        A join under way is withdrawn at once. A round under way gets most of the time to end by
        itself, then it is abandoned. Calls that wait then raise GroupLeft, as does every later one.

        Args:
            reason: Why, for people.
            timeout_s: Longest time that this takes.
        """
        ...

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """Wait for the others and return who takes part.

        Args:
            report: The period that ends with the round.
            deadline: Monotonic time at which to give up. None: while the group is paused, because
                too few members are there, there is no end to it.

        Raises:
            LeftBehind: the group committed this round without this member; it has to recover.
            GroupLeft: this member leaves.
            DeadlineExceeded: the others did not come in time.
        """
        ...

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Begin the weighted mean over all members of the plan.

        The values are copied before this returns. Values that are not finite are left out of
        the mean on every member. The mean is over the weights received, never the world size.

        Args:
            xs: Tensors of the same shapes on every member.
            codec: How they are encoded on the wire.
            weight: Weight of this member's values, >= 0.
            key: Names the codec's residual state.
        """
        ...

    def swap(self, parcels: Sequence[PeerMessage], *, weight: float = 1.0) -> Work[AllToAllResult]:
        """Begin to give packets to named members and to get what others have for this one.

        The packets are not looked at on the way; values that are not finite are the receiver's
        business. A member that is lost meanwhile is left out on every member.

        Args:
            parcels: What to give to whom; called on every member, even with nothing to give.
            weight: Told to all, >= 0.
        """
        ...

    def commit(
        self,
        reduced: Decidable | None,
        *,
        ok: bool = True,
        reason: str = "",
        lease: Lease | None = None,
        resting: Resting = nullcontext,
    ) -> Verdict:
        """Vote, and return the one verdict of all; settles the codecs of the reduces.

        Args:
            reduced: What the exchanges gave; None votes against.
            ok: Whether this member can apply it.
            reason: Why not, for people.
            lease: Position in this member's data, if it has moved since the join.
            resting: Surrounds the wait, but not what changes the codec after it.

        Raises:
            LeftBehind: the group committed another result than this member has.
            GroupLeft: this member leaves, and the verdict did not come in time.
        """
        ...

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """Ask one of the job's parameter servers; outside of rounds, one ask at a time for each.

        The same ask again is answered the same and changes nothing more. The answer may take as
        long as the server's clocks hold this member back.

        Args:
            ask: What to ask.
            packet: What goes along.
            server: Which one, from 0.

        Raises:
            PeerLost: (waiting) the server is gone, or never was there.
            DeadlineExceeded: (waiting) nothing was heard of it for too long.
        """
        ...

    def close(self) -> None:
        """Release sockets and threads; the group cannot be used again."""
        ...


def flatten(xs: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return all values as one 1-D float32 vector in main memory, a copy.

    Args:
        xs: Tensors of any shape, type and device.
        out: Written into if it has the right size: fresh pages cost more than the copy.
    """
    sizes = [x.numel() for x in xs]
    vector = out if out is not None and out.numel() == sum(sizes) else torch.empty(sum(sizes))
    for x, part in zip(xs, torch.split(vector, sizes) if sizes else (), strict=True):
        part.copy_(x.detach().reshape(-1))
    return vector


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat vector in the shapes of `like`, moved to their devices."""
    sizes = [x.numel() for x in like]
    views = torch.split(vector, sizes) if sizes else ()
    return [view.view(x.shape).to(x.device) for view, x in zip(views, like, strict=True)]
