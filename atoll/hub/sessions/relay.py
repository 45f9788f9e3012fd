"""Forwards the chunks that members and reducers send each other, without looking inside.

Memory is bounded by credit: for each pair of sender and receiver at most one window waits at the
hub. The window is `WINDOW_BYTES` where few processes are connected and smaller where many are, so
that readers which stand still cannot fill the hub together either. Every byte that a connection
hands over is credited to it exactly once, when it was written to the receiver or dropped; a sender
that does not wait for credit is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import WireError
from atoll.hub.sessions.send_queue import RelayFrame
from atoll.wire.frames import Frame, decode_relay
from atoll.wire.limits import WINDOW_BYTES
from atoll.wire.messages import Credit, Undeliverable

if TYPE_CHECKING:
    from atoll.hub.sessions.session import Session, Sessions


BUDGET_BYTES = 64 * 2**20
"""What the windows of all sessions may come to, as long as none is below the smallest."""

SMALLEST_BYTES = 512 * 2**10
"""Window of a sender among hundreds: two chunks, 40 Mbit/s at 100 ms round trip."""


class PolicyBroken(WireError):
    """A sender did what the protocol forbids; its connection is closed with 1008."""

    def to_dict(self) -> dict[str, str]:
        """Return it as a `WireError`, the kind that every client knows."""
        return {**super().to_dict(), "kind": "WireError"}


@dataclass(slots=True)
class RelayPair:
    """The books of one sender and one receiver, in bytes of whole frames."""

    generation: int = 0
    """The connection of the sender whose window `owed` is."""
    window: int = 0
    """What the sender was told on that connection."""
    queued: int = 0
    """Waiting here, whichever connection brought it."""
    owed: int = 0
    """Brought by the present connection and not credited yet."""
    uncredited: int = 0
    """Part of `owed` that has left and is credited with the next notice."""


class Relay:
    """The forwarding plane of the hub."""

    def __init__(self, sessions: Sessions, *, window_bytes: int = WINDOW_BYTES) -> None:
        self._sessions = sessions
        self.window_bytes = window_bytes
        self._pairs: dict[tuple[str, str], RelayPair] = {}
        self._per_job: dict[str, int] = {}
        self.frames = 0
        self.bytes = 0
        self.dropped = 0

    def window_for(self, sessions: int) -> int:
        """Return the window of a connection that is one of so many."""
        share = BUDGET_BYTES // max(1, sessions)
        return min(self.window_bytes, max(SMALLEST_BYTES, share))

    def forward(self, sender: Session, frame: Frame) -> None:
        """Queue a relay frame for its receiver.

        Raises:
            WireError: its addresses are malformed.
            PolicyBroken: it names another sender, or overruns the window.
        """
        relay = decode_relay(frame)
        if relay.source != sender.address:
            raise PolicyBroken(
                "a relay frame names another sender", given=relay.source, expected=sender.address
            )
        nbytes = len(frame.raw)
        pair = self._pair(sender, relay.to)
        if pair.owed + nbytes > pair.window:
            raise PolicyBroken(
                "a sender overran its relay window",
                given=f"{pair.owed + nbytes} bytes under way to {relay.to}",
                expected=f"at most {pair.window}",
            )
        pair.owed += nbytes
        receiver = self._sessions.get(relay.to)
        if receiver is None or not _may_reach(sender, receiver):
            self._drop(sender.address, relay.to, nbytes)
            return
        if pair.queued + nbytes > pair.window:
            self._discard_older(pair, receiver, sender)
        pair.queued += nbytes
        self.frames += 1
        self.bytes += nbytes
        self._per_job[sender.job] = self._per_job.get(sender.job, 0) + nbytes
        receiver.send_queue.put_relayed(RelayFrame(relay.source, sender.generation, frame.raw))

    def frame_written(self, receiver: str, frame: RelayFrame) -> None:
        """Book a frame as gone from the hub and credit its sender, a quarter window at a time."""
        pair = self._pairs.get((frame.source, receiver))
        if pair is None:
            return
        nbytes = len(frame.raw)
        pair.queued -= nbytes
        if frame.generation != pair.generation:
            return
        pair.uncredited += nbytes
        if pair.uncredited >= pair.window // 4 or pair.uncredited == pair.owed:
            self._credit(frame.source, receiver, pair)

    def receiver_lost(self, receiver: Session) -> None:
        """Drop what waits for a session that is lost and tell each sender."""
        for frame in receiver.send_queue.take_relayed():
            self._account_dropped(receiver.address, frame)
        for source, to in [key for key in self._pairs if receiver.address in key]:
            pair = self._pairs[source, to]
            if to == receiver.address and pair.uncredited:
                self._credit(source, to, pair)
            if not pair.queued and (source == receiver.address or not pair.owed):
                del self._pairs[source, to]

    def job_bytes(self, job: str) -> int:
        """Return how many bytes were relayed for a job since the hub started."""
        return self._per_job.get(job, 0)

    def queued_bytes(self, source: str, to: str) -> int:
        """Return how many bytes of a pair wait here now."""
        pair = self._pairs.get((source, to))
        return pair.queued if pair else 0

    def _pair(self, sender: Session, to: str) -> RelayPair:
        fresh = RelayPair(generation=sender.generation, window=sender.window_bytes)
        pair = self._pairs.setdefault((sender.address, to), fresh)
        if pair.generation != sender.generation:
            pair.generation, pair.owed, pair.uncredited = sender.generation, 0, 0
            pair.window = sender.window_bytes
        return pair

    def _credit(self, source: str, to: str, pair: RelayPair) -> None:
        nbytes, pair.uncredited = pair.uncredited, 0
        pair.owed -= nbytes
        sender = self._sessions.get(source)
        if sender is not None and sender.generation == pair.generation:
            sender.notify(Credit(to, nbytes))

    def _drop(self, source: str, to: str, nbytes: int) -> None:
        """Credit bytes that were never queued, then say why they went nowhere."""
        pair = self._pairs[source, to]
        pair.uncredited += nbytes
        self.dropped += 1
        self._credit(source, to, pair)
        if not pair.queued and not pair.owed:
            del self._pairs[source, to]
        sender = self._sessions.get(source)
        if sender is not None:
            sender.notify(Undeliverable(to))

    def _account_dropped(self, receiver: str, frame: RelayFrame) -> None:
        """Book one dropped frame; the sender hears of it once per frame, credit first."""
        self.dropped += 1
        self.frame_written(receiver, frame)
        pair = self._pairs[frame.source, receiver]
        if not pair.queued:
            if pair.uncredited:
                self._credit(frame.source, receiver, pair)
            sender = self._sessions.get(frame.source)
            if sender is not None:
                sender.notify(Undeliverable(receiver))

    def _discard_older(self, pair: RelayPair, receiver: Session, sender: Session) -> None:
        """Make room by dropping what an earlier connection of the sender had left here.

        Its receiver asks for the missing pieces again, and the sender knows that the old
        connection may have lost them.
        """
        older = receiver.send_queue.take_relayed(
            lambda p: p.source == sender.address and p.generation != sender.generation
        )
        self.dropped += len(older)
        pair.queued -= sum(len(frame.raw) for frame in older)


def _may_reach(sender: Session, receiver: Session) -> bool:
    """Members and reducers reach their own job only; nodes relay nothing."""
    return bool(sender.job) and sender.job == receiver.job
