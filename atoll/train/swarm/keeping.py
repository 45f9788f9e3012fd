"""Send copies of the own sum to another member of the stage, and keep those of others.

For the member's own thread; a thread of the channel only records when a copy has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.errors import PeerRefused
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.runner import StageRunner, StepSum
from atoll.swarm.copies import Copies
from atoll.train.swarm.work import SEND_S
from atoll.wire.message import Message
from atoll.wire.swarm import Copy, Holder, Share, SwarmKept, SwarmPeer, pack_head


@dataclass(slots=True)
class Keeping:
    """See the module's docstring."""

    channel: PeerChannel
    ask: Callable[[Message], None]
    """Asks the ledger; the answer becomes an event."""
    clock: Clock
    copies: Copies = field(default_factory=Copies)
    _vectors: dict[int, Tensor] = field(default_factory=dict)
    """float32 means as in a round, by number of the copy."""
    _began: float = 0.0
    _ended: list[float] = field(default_factory=list)
    """When the copy on its way has arrived, or failed."""

    def clear(self) -> None:
        """Drop all copies: the step is over, or its work was dropped."""
        self.copies.clear(self.clock.monotonic())
        self._vectors.clear()

    def send(
        self, me: Holder, table: Sequence[SwarmPeer], folded: Sequence[Share], runner: StageRunner
    ) -> None:
        """Send a copy of the own sum if one is due."""
        now = self.clock.monotonic()
        while self._ended:
            self.copies.arrived(self._ended.pop() - self._began, now)
        to = self.copies.due(me, runner.stage.number, table, folded, now)
        if to is None:
            return
        vector, total = runner.gradient()
        head = Copy(me, runner.step, list(folded), total.rows, total.loss)
        self.copies.sent(len(folded))
        self._began = now
        data = vector.contiguous().numpy().data
        done = self.channel.send(to.member, pack_head(head), [data], timeout_s=SEND_S)

        def ended(_: Future[None]) -> None:
            self._ended.append(self.clock.monotonic())

        done.add_done_callback(ended)

    def arrived(self, copy: Copy, mail: PeerMail, *, epoch: int, runner: StageRunner) -> None:
        """Keep a copy of another member's sum, and tell the ledger."""
        elements = sum(shape.numel() for shape in runner.shapes)
        if copy.step != runner.step or len(mail.data) != 4 * elements:
            return
        number = self.copies.keep(copy)
        self._vectors[number] = torch.frombuffer(bytearray(mail.data), dtype=torch.float32)
        self.ask(SwarmKept(epoch, copy.of, copy.step, number, copy.shares))

    def answered(self, question: SwarmKept, *, used: bool | None) -> None:
        """Handle the ledger's answer; None: there was none, and it is asked again."""
        if used is None:
            if self.copies.asks(question.number):
                self.ask(question)
            return
        for number in self.copies.kept(question.number, used=used):
            self._vectors.pop(number, None)

    def take_over(self, number: int, runner: StageRunner) -> Sequence[Share]:
        """Add a lost member's sum to the own one; return what it holds.

        Raises:
            PeerRefused: the copy is not here.
        """
        copy, vector = self.copies.take(number), self._vectors.pop(number, None)
        if copy is None or vector is None:
            raise PeerRefused("a copy of a sum is to be counted that is not here", given=number)
        runner.add(vector, StepSum(copy.rows, copy.loss))
        return copy.shares
