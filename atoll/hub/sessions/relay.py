"""Forwards chunks between the members and reducers of a job, as opaque bytes.

Memory is bounded by credit: per pair of sender and receiver, at most one window is queued at the
hub. The window is `WINDOW_BYTES` with few connections and smaller with many, so that stopped
readers together cannot fill the hub. Each byte is credited to the connection that sent it exactly
once, when it was written to the receiver or dropped. A sender that exceeds its window is
disconnected.
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
"""Sum of all windows, as long as none is smaller than `SMALLEST_BYTES`."""

SMALLEST_BYTES = 512 * 2**10
"""Window with hundreds of connections: two chunks, 40 Mbit/s at 100 ms round trip."""


class PolicyBroken(WireError):
    """A sender violated the protocol; its connection is closed with 1008."""

    def to_dict(self) -> dict[str, str]:
        """Serialize as `WireError`, which every client knows."""
        return {**super().to_dict(), "kind": "WireError"}


@dataclass(slots=True)
class RelayPair:
    """Byte counts of one sender and one receiver; frames are counted with their header."""

    generation: int = 0
    """The sender's connection that `owed` refers to."""
    window: int = 0
    """Window announced on that connection."""
    queued: int = 0
    """Bytes queued here, from all connections of the sender."""
    owed: int = 0
    """Bytes sent on the current connection and not credited yet."""
    uncredited: int = 0
    """Part of `owed` that was written; the next Credit returns it."""


class Relay:
    """Forwards relay frames."""

    def __init__(self, sessions: Sessions, *, window_bytes: int = WINDOW_BYTES) -> None:
        self._sessions = sessions
        self.window_bytes = window_bytes
        self._pairs: dict[tuple[str, str], RelayPair] = {}
        self._per_job: dict[str, int] = {}
        self.frames = 0
        self.bytes = 0
        self.dropped = 0

    def window_for(self, sessions: int) -> int:
        """Return the window of each of `sessions` connections."""
        share = BUDGET_BYTES // max(1, sessions)
        return min(self.window_bytes, max(SMALLEST_BYTES, share))

    def forward(self, sender: Session, frame: Frame) -> None:
        """Queue a relay frame for its receiver.

        Raises:
            WireError: its addresses are malformed.
            PolicyBroken: it names another sender, or exceeds the window.
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
                "a sender exceeded its relay window",
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
        """Account a written frame, and credit its sender once a quarter of the window is due."""
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
        """Drop the frames of a lost session and notify their senders."""
        for frame in receiver.send_queue.take_relayed():
            self._account_dropped(receiver.address, frame)
        for source, to in [key for key in self._pairs if receiver.address in key]:
            pair = self._pairs[source, to]
            if to == receiver.address and pair.uncredited:
                self._credit(source, to, pair)
            if not pair.queued and (source == receiver.address or not pair.owed):
                del self._pairs[source, to]

    def job_bytes(self, job: str) -> int:
        """Return the bytes relayed for a job since the hub started."""
        return self._per_job.get(job, 0)

    def queued_bytes(self, source: str, to: str) -> int:
        """Return the bytes of a pair that are queued now."""
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
        """Credit bytes that were not queued, then send Undeliverable."""
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
        """Account one dropped frame; the sender gets Credit first, then Undeliverable."""
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
        """Drop queued frames of the sender's earlier connections; both sides expect this loss."""
        older = receiver.send_queue.take_relayed(
            lambda p: p.source == sender.address and p.generation != sender.generation
        )
        self.dropped += len(older)
        pair.queued -= sum(len(frame.raw) for frame in older)


def _may_reach(sender: Session, receiver: Session) -> bool:
    return bool(sender.job) and sender.job == receiver.job
