"""The protocol between strategies and the other members: join a round, reduce, commit.

A round is a transaction. `join` fixes the members, `reduce` gives every member the same mean,
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
from atoll.group.aggregation import Aggregation
from atoll.group.in_process.servers import ServerRequest
from atoll.group.period import PeriodReport
from atoll.reducer.all_to_all import PeerMessage as PeerMessage
from atoll.wire.messages import Lease, RoundPlan, Sources, Verdict
from atoll.wire.parameter_server_messages import Ask

T = TypeVar("T")

Resting = Callable[[], AbstractContextManager[None]]
"""Surrounds a wait during which other threads may read the state; see `StateLock.resting`."""


class Work(Generic[T]):
    """Result of work on another thread, with a bounded wait."""

    def __init__(self, *, deadline: float | None = None) -> None:
        """Create pending work, to be ended by :meth:`finish` or :meth:`fail`.

        Every wait ends at the monotonic `deadline`, if there is one.
        """
        self._future: Future[T] = Future()
        self._deadline = deadline

    @classmethod
    def of(cls, value: T) -> Work[T]:
        """Return completed work."""
        work: Work[T] = cls()
        work.finish(value)
        return work

    @classmethod
    def start(
        cls, function: Callable[[], T], *, name: str, deadline: float | None = None
    ) -> Work[T]:
        """Run `function` on a daemon thread; `wait` raises its errors."""
        work: Work[T] = cls(deadline=deadline)

        def body() -> None:
            try:
                work.finish(function())
            except BaseException as error:  # any error is raised by `wait`
                work.fail(error)

        threading.Thread(target=body, name=name, daemon=True).start()
        return work

    def finish(self, value: T) -> None:
        """Set the value, unless the work has ended."""
        try:
            self._future.set_result(value)
        except InvalidStateError:
            return

    def fail(self, error: BaseException) -> None:
        """Set an error, unless the work has ended."""
        try:
            self._future.set_exception(error)
        except InvalidStateError:
            return

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the value; never a partial one.

        The wait is limited by `timeout_s` and by the work's own deadline.

        Raises:
            DeadlineExceeded: it did not end in time.
            PeerLost: a member or the reducer was lost before its part was complete.
            EpochChanged: the plan was replaced.
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
                "an exchange of the group did not end in time", given=f"waited {left_s:.1f} s"
            ) from None


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result of a reduce, bitwise equal on every member."""

    tensors: list[Tensor]
    """Weighted means, float32, in the shapes and on the devices of the inputs."""
    contributors: tuple[str, ...]
    """Members with values in the mean, in slot order."""
    weight: float
    """Sum of the weights received, by which the mean was divided."""
    sent_bytes: int
    """Bytes sent by this member, including headers where known."""
    received_bytes: int
    digest: str
    """BLAKE3 of the encoded result and the contributors, compared in `commit`."""


@dataclass(frozen=True, slots=True)
class AllToAllResult:
    """The packets that this member received in an all-to-all."""

    packets: Mapping[str, list[Packet]]
    """Sender -> its packets for this member, in the order sent; senders in slot order."""
    weights: Mapping[str, float]
    """Weight of every contributor, in slot order; equal on every member."""
    sent_bytes: int
    """Bytes sent to others, including headers where known. The relay counts a message once, the
    direct route once per recipient."""
    received_bytes: int
    digest: str
    """BLAKE3 over the packets of all members, equal on every member."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Members that took part, in slot order."""
        return tuple(self.weights)


class Decidable(Protocol):
    """The part of an exchange's result on which the verdict depends."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Members with values in the result."""
        ...

    @property
    def digest(self) -> str:
        """Equal on every member with the same result."""
        ...


class Group(Protocol):
    """The members of a job, as one of them sees them.

    After a join there may be several exchanges (reduces and all-to-alls), in the same order on
    every member; then one commit decides on all of them.
    """

    aggregation: Aggregation
    """Set before the first join; MUST be equal on every member."""

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
        """Rounds committed so far, which is the number of the next one."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether the last plan's round ends the job."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called, after which no round can be joined."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by all exchanges so far."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes received by all exchanges so far."""
        ...

    @property
    def upload_s(self) -> float | None:
        """Seconds until the last contribution had left this machine; None: unknown."""
        ...

    def recover(self, failed: Sequence[str] = (), *, ready: bool = True) -> Sources:
        """Return the donors of the committed state, and set `committed_round` to it.

        Rounds wait, a bounded time, for the member that asked. If no member holds the state, the
        run is reset to its newest checkpoint, and there are no peers.

        Args:
            failed: Donors that failed during this recovery.
            ready: Whether the state can be loaded at once. A member that is still starting and only
                prefetches passes False, and rounds do not wait for it.
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
        """Report that this member has recovered the state after `round_` rounds.

        `base` is its digest; `sources` are the donors, or `checkpoint`.
        """
        ...

    def leave(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """Leave for good: rounds stop waiting for this member. Thread-safe.

        A pending join is withdrawn at once. An open round gets most of `timeout_s` to end, then it
        is abandoned. Pending and later calls raise GroupLeft.
        """
        ...

    def announce(self, report: PeriodReport) -> None:
        """Ask for the plan of a round while this member computes its last steps before it.

        :meth:`join` then finds the plan, and :meth:`commit` reports the numbers given to
        :meth:`join` instead of these. Returns at once.
        """
        ...

    def join(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan:
        """Wait for the plan of a round.

        While the group is paused for lack of members, the wait ends only at the monotonic
        `deadline`.

        Raises:
            LeftBehind: the group committed this round without this member, which has to recover.
            GroupLeft: this member leaves.
            DeadlineExceeded: the other members did not join in time.
        """
        ...

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Start the weighted mean over all members of the plan.

        The values are copied before this returns. Values that are not finite are left out of the
        mean on every member. The divisor is the sum of the weights received, never the world size.

        Args:
            xs: Tensors of the same shapes on every member.
            codec: Encoding on the wire.
            weight: Weight of this member's values, >= 0.
            key: Key of the codec's residual state.
        """
        ...

    def all_to_all(
        self, messages: Sequence[PeerMessage], *, weight: float = 1.0
    ) -> Work[AllToAllResult]:
        """Start an all-to-all: send packets to named members and receive theirs.

        The packets are opaque; receivers have to check for values that are not finite. A member
        lost during the exchange is left out on every member.

        Args:
            messages: Packets and their recipients; every member MUST call this, even without
                packets.
            weight: Sent to all members, >= 0.
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
        """Vote and return the common verdict; settles the residuals of the codecs.

        Args:
            reduced: Result of the exchanges; None votes against.
            ok: Whether this member can apply it.
            reason: Why not, for people.
            lease: Position in this member's data, if it has moved since the join.
            resting: Surrounds the wait, but not the change of the codecs after it.

        Raises:
            LeftBehind: the group committed another result than this member has.
            GroupLeft: this member leaves, and the verdict did not arrive in time.
        """
        ...

    def ask_server(
        self, ask: Ask, packet: Packet | None = None, *, server: int = 0
    ) -> Work[ServerRequest]:
        """Send an ask to a parameter server; outside of rounds, one at a time per server.

        A repeated ask gets the same answer and has no further effect. The answer may take as long
        as the server's clocks hold this member back. Waiting raises PeerLost if the server is gone,
        and DeadlineExceeded if it was silent for too long.
        """
        ...

    def close(self) -> None:
        """Release sockets and threads; the group is unusable afterwards."""
        ...


def flatten(xs: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return a copy of all values as one 1-D float32 vector on the CPU.

    It is written into `out` if that has the right size, because mapping fresh pages costs more than
    the copy.
    """
    sizes = [x.numel() for x in xs]
    vector = out if out is not None and out.numel() == sum(sizes) else torch.empty(sum(sizes))
    for x, part in zip(xs, torch.split(vector, sizes) if sizes else (), strict=True):
        part.copy_(x.detach().reshape(-1))
    return vector


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat vector in the shapes of `like`, moved to their devices.

    Those of a float64 tensor are copies in float64, which the caller may go on to compute with.
    """
    sizes = [x.numel() for x in like]
    views = torch.split(vector, sizes) if sizes else ()
    found = [view.view(x.shape).to(x.device) for view, x in zip(views, like, strict=True)]
    wide = torch.float64
    return [t.to(wide) if x.dtype == wide else t for t, x in zip(found, like, strict=True)]
