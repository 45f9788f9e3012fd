"""SparseLoCo: DiLoCo with plain outer steps, sparse packets and feedback that fades."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.methods.periodic import Average, DiLoCo
from atoll.strategies.resolve import resolve
from tests.contracts.strategy_suite import Reference, StrategySuite, adamw, train_together

SPARSE = "feedback:0.9(topk:0.25:8)"


class TestSparseLoCo(StrategySuite):
    name = "sparseloco"
    options = DiLoCo(every=3, outer_optimizer="sgd", outer_lr=0.8)
    codec = "feedback:0.95(topk:0.25:8|mean2)"
    coarse = codec
    wires = (codec, SPARSE)

    def same_as_plain(self) -> Any:
        return DiLoCo(every=3, outer_optimizer="sgd", outer_lr=1.0)

    @pytest.mark.parametrize("members", [2, 3])
    def test_members_follow_the_formula(self, members: int) -> None:
        runs = train_together(self.options, members=members, steps=self.steps, codec=SPARSE)
        expected = self.sparse(members, self.steps)
        assert (runs[0].vector().double() - expected).abs().max() < self.tolerance

    def reference(self, members: int, steps: int) -> Tensor:
        """Return the formula without a codec."""
        return self.sparse(members, steps, keep=8, decay=1.0)

    def sparse(self, members: int, steps: int, *, keep: int = 2, decay: float = 0.9) -> Tensor:
        those = Reference.make(members, adamw)
        theta = those.vectors()[0]
        e = [torch.zeros_like(theta) for _ in range(members)]
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                total = torch.zeros_like(theta)
                for member, now in enumerate(those.vectors()):
                    e[member] = decay * e[member] + theta - now
                    sent = torch.zeros_like(theta)
                    for first in range(0, 26, 8):
                        part = e[member][first : first + 8]
                        count = max(1, int(len(part) * keep / 8 + 0.5))
                        places = part.abs().topk(count).indices
                        sent[first : first + 8][places] = part[places]
                    e[member] -= sent
                    total += sent
                theta = theta - 0.8 * total / members
                those.assign(theta)
        return theta


@pytest.mark.parametrize("decay", ["", ":0.5"])
def test_all_values_unquantised_at_rate_1_is_plain_averaging(decay: str) -> None:
    """Nothing is left for feedback, so its decay does not matter either."""
    options = DiLoCo(every=3, outer_optimizer="sgd", outer_lr=1.0)
    sparse = train_together(options, members=3, steps=9, codec=f"feedback{decay}(topk:1:8)")
    plain = train_together(Average(every=3), members=3, steps=9)
    assert (sparse[0].vector() - plain[0].vector()).abs().max() < 1e-6


def test_what_members_send_and_still_owe_is_what_they_moved() -> None:
    """With decay 1 the mean over members is conserved: sent + residuals = pseudo-gradients."""
    codecs = [make_codec("feedback:1(topk:0.125:512|mean2)") for _ in range(4)]
    moved, sent = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    for round_ in range(6):
        for member, codec in enumerate(codecs):
            generator = torch.Generator().manual_seed(10 * round_ + member)
            x = torch.randn(5000, generator=generator)
            moved += x
            sent += codec.base.decode(codec.encode(x, key="delta"))
            codec.finish(committed=True)
    owed = sum(codec.state_dict()["delta"].double() for codec in codecs)
    assert (sent + owed - moved).abs().max() < 1e-4


def test_the_mean_divides_by_all_members_not_by_the_senders() -> None:
    """Members that chose different values would otherwise step as many times too far."""
    first, second = torch.tensor([4.0, 0.0, 0.0, 0.1]), torch.tensor([0.0, 3.0, 0.1, 0.0])
    codec, total = make_codec("topk:0.25:4"), torch.zeros(4)
    for x in (first, second):
        codec.decode_add(codec.encode(x), out=total, weight=0.5)
    assert total.tolist() == [2.0, 1.5, 0.0, 0.0]


def test_packets_are_a_64th_of_fp32s() -> None:
    resolved = resolve(StrategyTable(preset="sparseloco"))
    assert resolved.outer == "diloco"
    assert 63 < 4_000_000 / make_codec(resolved.codec).nbytes(1_000_000) < 64
    papers = make_codec("feedback:0.95(topk:0.015625:4096|mean2)")
    assert 203 < 4_000_000 / papers.nbytes(1_000_000) < 205
