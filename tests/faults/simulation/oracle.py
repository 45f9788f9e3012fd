"""What must hold whatever happens: the oracle watches a world and remembers what did not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from atoll.group.run_round import CommittedMean
from atoll.wire.messages import Lease, RoundPlan, Verdict

if TYPE_CHECKING:
    from tests.faults.simulation.world import World

_plans = msgspec.msgpack.Decoder(RoundPlan)
_verdicts = msgspec.msgpack.Decoder(Verdict)

Stretch = tuple[int, int, int]
"""Slot, from sample, to sample."""


@dataclass(frozen=True)
class Contribution:
    """What one member gave to one attempt of a round."""

    member: str
    incarnation: str
    weight: float
    values: Tensor
    stretch: Stretch


@dataclass
class History:
    """Committed rounds since the beginning, or since the run was set back."""

    digests: dict[int, str] = field(default_factory=dict)
    """Round -> digest of the state after it."""
    epochs: dict[int, int] = field(default_factory=dict)
    stretches: dict[int, list[Stretch]] = field(default_factory=dict)


class Oracle:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broken: list[str] = []
        self.history = History()
        self.verdicts: dict[int, Verdict] = {}
        self.given: dict[int, dict[str, Contribution]] = defaultdict(dict)
        self.applied: dict[int, set[str]] = defaultdict(set)
        self._checked: set[int] = set()
        self.wasted_steps = 0

    def complain(self, what: str) -> None:
        """Remember a broken promise."""
        if len(self.broken) < 8:
            self.broken.append(f"{self.world.scheduler.now - 1000:.3f} s: {what}")
            self.world.note(f"!! {what}")

    # --------------------------------------------------------------------- what members do

    def gives(self, epoch: int, contribution: Contribution) -> None:
        """A member starts to reduce."""
        self.given[epoch][contribution.member] = contribution

    def told(self, verdict: Verdict) -> None:
        """The hub told somebody a verdict."""
        known = self.verdicts.setdefault(verdict.epoch, verdict)
        if known != verdict:
            self.complain(f"two verdicts on epoch {verdict.epoch}: {known} and {verdict}")
        self._check_leases(verdict.leases)

    def _check_leases(self, leases: dict[str, Lease]) -> None:
        slots = [lease.slot for lease in leases.values()]
        if len(set(slots)) < len(slots):
            self.complain(f"a slot is leased twice in one verdict: {leases}")

    def applies(self, member: str, incarnation: str, agreed: CommittedMean, digest: str) -> None:
        """A member has applied a committed round and stands on `digest` now."""
        verdict, plan, reduced = agreed.verdict, agreed.plan, agreed.reduced
        epoch, round_ = verdict.epoch, verdict.round
        if not verdict.committed:
            self.complain(f"{member} applied epoch {epoch}, which is not committed")
        if incarnation in self.applied[epoch]:
            self.complain(f"{member} applied epoch {epoch} twice")
        self.applied[epoch].add(incarnation)
        if member not in plan.members:
            self.complain(f"{member} applied epoch {epoch} without being in its plan")
        if plan.route != "alone" and verdict.digest != reduced.digest:
            self.complain(f"{member} applied another result than the verdict's in epoch {epoch}")
        if list(verdict.contributors) != list(reduced.contributors) and plan.route != "alone":
            self.complain(f"{member} and the verdict on epoch {epoch} count other contributors")
        self._count_history(round_, epoch, digest, member)
        self._check_mean(epoch, reduced.contributors, reduced.weight, reduced.tensors[0])
        self._check_tokens(round_, epoch, verdict.contributors or list(reduced.contributors))

    def stands(self, member: str, round_: int, digest: str, how: str) -> None:
        """A member has taken over a state."""
        known = self.history.digests.get(round_ - 1)
        if known is not None and known != digest:
            self.complain(
                f"{member} took over {digest[:8]} for round {round_} from {how}; it is {known[:8]}"
            )

    def _count_history(self, round_: int, epoch: int, digest: str, member: str) -> None:
        history = self.history
        known = history.epochs.setdefault(round_, epoch)
        if known != epoch:
            self.complain(f"round {round_} was committed in epoch {known} and in {epoch}")
        first = history.digests.setdefault(round_, digest)
        if first != digest:
            self.complain(
                f"after round {round_} {member} stands on {digest[:8]}, others on {first[:8]}"
            )

    def _check_mean(
        self, epoch: int, contributors: Sequence[str], weight: float, mean: Tensor
    ) -> None:
        """The mean is that of what the contributors gave, each once."""
        if epoch in self._checked:
            return  # replicas have equal digests: one member's mean is everybody's
        self._checked.add(epoch)
        given = self.given.get(epoch, {})
        missing = [m for m in contributors if m not in given]
        if missing or len(set(contributors)) != len(contributors):
            self.complain(f"epoch {epoch} counts {contributors}, of which {missing} gave nothing")
            return
        parts = [given[m] for m in contributors]
        total = math.fsum(part.weight for part in parts)
        if not math.isclose(total, weight, rel_tol=1e-6):
            self.complain(f"epoch {epoch}: weight {weight}, but its contributors gave {total}")
        expected = torch.stack([part.values.double() * part.weight for part in parts]).sum(0)
        if not torch.allclose(mean.double() * total, expected, rtol=1e-5, atol=1e-4):
            self.complain(f"epoch {epoch}: the mean is not that of {contributors}")

    def _check_tokens(self, round_: int, epoch: int, contributors: Sequence[str]) -> None:
        """No sample is in two committed means, no slot is trained by two in one round."""
        if round_ in self.history.stretches:
            return
        given = self.given.get(epoch, {})
        stretches = [given[m].stretch for m in contributors if m in given]
        slots = [slot for slot, begin, end in stretches if end > begin]
        if len(set(slots)) < len(slots):
            self.complain(f"two members trained on one slot in epoch {epoch}: {stretches}")
        for earlier, others in self.history.stretches.items():
            for slot, begin, end in stretches:
                for other, first, last in others:
                    if slot == other and begin < last and first < end:
                        self.complain(
                            f"samples {begin}..{end} of slot {slot} in round {round_} were"
                            f" counted in round {earlier} ({first}..{last})"
                        )
        self.history.stretches[round_] = stretches

    # ------------------------------------------------------------------------- what hubs do

    def rewound(self, to: int) -> None:
        """The run was set back to a checkpoint: what came after it never happened."""
        history = self.history
        for table in (history.digests, history.epochs, history.stretches):
            for round_ in [r for r in table if r >= to]:
                del table[round_]

    def check_records(self) -> None:
        """Compare what was told with what is durable."""
        rows = self.world.disk.connection.execute(
            "SELECT epoch, round, plan, verdict FROM rounds WHERE job = 'job' ORDER BY epoch"
        ).fetchall()
        stored: dict[int, Verdict] = {}
        expected = 0
        rewinds = list(self.world.rewinds)
        for epoch, round_, plan, data in rows:
            if data is None:
                continue
            verdict = stored[epoch] = _verdicts.decode(data)
            if _plans.decode(plan).round != round_ or verdict.round != round_:
                self.complain(f"epoch {epoch} is of two rounds")
            if not verdict.committed:
                continue
            while rewinds and round_ != expected and rewinds[0] == round_:
                expected = rewinds.pop(0)
            if round_ != expected:
                self.complain(f"round {round_} was committed when {expected} was next")
            expected = round_ + 1
        for epoch, verdict in self.verdicts.items():
            if epoch in stored and stored[epoch] != verdict:
                self.complain(f"epoch {epoch} was told {verdict}, stored is {stored[epoch]}")
            if epoch not in stored and verdict.committed:
                self.complain(f"epoch {epoch} was told as committed, nothing is stored")

    def check_end(self, live: list[Any]) -> None:
        """Everybody who lives stands on the same state."""
        digests = {member.name: (member.round, member.digest()) for member in live}
        if len(set(digests.values())) > 1:
            self.complain(f"replicas differ at the end: {digests}")
