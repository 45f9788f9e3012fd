"""A group of one, without a hub: what a script on a single machine uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atoll.codec.codec import Codec
from atoll.errors import LeftBehind
from atoll.group.group import Reduced, Work
from atoll.wire.messages import RoundPlan, Verdict

ALONE_DIGEST = "alone"
"""Digest of a result that never left its member."""


class Alone:
    """One member; `reduce` returns its own values exactly, `commit` always commits."""

    def __init__(self, *, me: str = "w0", committed_round: int = 0) -> None:
        """Start at round `committed_round` as member `me`."""
        self.me = me
        self.members: tuple[str, ...] = (me,)
        self.epoch = 0
        self.committed_round = committed_round
        self.stopping = False
        self.sent_bytes = 0
        self.received_bytes = 0

    def join(
        self, round_: int, *, base: str, tokens: int = 0, deadline: float | None = None
    ) -> RoundPlan:
        """Return the plan of a round of one; see :meth:`Group.join`."""
        if round_ != self.committed_round:
            raise LeftBehind(
                "this is not the next round",
                given=f"round {round_}",
                expected=f"committed round {self.committed_round}",
            )
        self.epoch += 1
        return RoundPlan(
            job="", round=round_, epoch=self.epoch, members=[self.me], route="alone",
            stopping=self.stopping,
        )  # fmt: skip

    def reduce(
        self, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str = "x"
    ) -> Work[Reduced]:
        """Return copies of the values as they are: no wire, hence no codec."""
        return Work.of(own_values(xs, me=self.me, weight=weight))

    def commit(self, reduced: Reduced | None, *, ok: bool = True, reason: str = "") -> Verdict:
        """Commit if there is something to commit."""
        committed = ok and reduced is not None
        verdict = Verdict(
            round=self.committed_round, epoch=self.epoch, committed=committed, reason=reason,
            digest=ALONE_DIGEST, contributors=[self.me] if committed else [],
        )  # fmt: skip
        self.committed_round += committed
        return verdict

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def own_values(xs: Sequence[Tensor], *, me: str, weight: float) -> Reduced:
    """Return the mean over one member: its values, copied, as float32."""
    tensors = [x.detach().float().clone() for x in xs]
    return Reduced(
        tensors=tensors, contributors=(me,), weight=weight, sent_bytes=0, received_bytes=0,
        digest=ALONE_DIGEST,
    )  # fmt: skip
