from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, GroupError, LossNotFinite, PeerRefused
from atoll.reducer.admission import Admitted, Candidate, admit
from atoll.reducer.aggregation import parse_admission
from atoll.reducer.combine import NormHistory, combine
from atoll.reducer.mean import Mean, Share, mean_of
from atoll.reducer.norm_history import MAX_HISTORIES, History

FP32 = make_codec("fp32")
NORMS = "mean/norms/x"


def judged(
    norms: Sequence[float],
    *,
    text: str = "norms",
    history: History | None = None,
    round_: int = 0,
    weights: Sequence[float] = (),
    bad: Mapping[str, AtollError] | None = None,
) -> Admitted:
    chosen = list(weights) or [1.0] * len(norms)
    return admit(
        [Candidate(f"w{i}", n, w) for i, (n, w) in enumerate(zip(norms, chosen, strict=True))],
        bad or {}, rule=parse_admission(text), history=history or History(), round_=round_,
    )  # fmt: skip


def usual(norm: float = 1.0, *, rounds: int = 12) -> History:
    history = History()
    for round_ in range(rounds):
        spread = [norm * factor for factor in (0.95, 1.0, 1.05, 1.0)]
        history = judged(spread, history=history, round_=round_).history
    return history


def test_a_norm_far_above_the_median_is_rejected() -> None:
    found = judged([1.0, 1.1, 0.9, 4.5])
    assert set(found.rejected) == {"w3"}
    assert "4 times the median" in str(found.rejected["w3"])
    assert not judged([1.0, 1.1, 0.9, 4.5], text="norms:5").rejected
    assert not judged([1.0, 1.1, 0.9, 4.5], text="norms:4:5").rejected  # below the floor


def test_what_is_left_is_shortened_to_half_of_that() -> None:
    found = judged([1.0, 1.0, 1.0, 3.0])
    assert found.scales == {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": pytest.approx(2 / 3)}


def test_weights_are_capped_at_four_times_the_median() -> None:
    honest = [10.0, 10.0, 12.0, *[10.0] * 6]
    found = judged([1.0] * 10, weights=[*honest, 1e6])
    assert list(found.weights.values()) == [*honest, 40.0]


@pytest.mark.parametrize(
    ("claimed", "used"),
    [
        ([1.0, 1.0, 1e9], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0, 1e9], [1.0, 1.0, 1.0, 1.5]),
        ([1e9, 1.0, 1.0, 1.0, 1e9], [3.0, 1.0, 1.0, 1.0, 3.0]),
        ([4.0, 3.0, 2.0, 1.0], [3.0, 3.0, 2.0, 1.0]),
        ([3.0, 2.0, 3.0, 2.0], [3.0, 2.0, 3.0, 2.0]),
        ([1.0, 1e9], [1.0, 4.0]),
    ],
)
def test_no_claim_of_tokens_gets_more_than_a_third(claimed: list[float], used: list[float]) -> None:
    found = judged([1.0] * len(claimed), weights=claimed)
    assert list(found.weights.values()) == used
    if len(claimed) >= 3:
        assert max(used) <= sum(used) / 3


def test_liar_about_tokens_does_not_turn_the_mean_of_three() -> None:
    vectors = {"w0": torch.ones(8), "w1": torch.ones(8), "w2": -torch.ones(8)}
    weights = {"w0": 1.0, "w1": 1.0, "w2": 1e9}
    shares = [
        Share(m, FP32.encode(v, key=m), weights[m], aggregation=NORMS) for m, v in vectors.items()
    ]
    found = combine(shares, codec=FP32, aggregation=NORMS, memory=NormHistory())
    torch.testing.assert_close(FP32.decode(found.packet), torch.full((8,), 1.0 / 3.0))


def test_a_norm_that_was_never_seen_is_rejected_after_ten_rounds() -> None:
    young, old = usual(rounds=9), usual(rounds=10)
    assert not judged([1.0, 1.0, 1.0, 3.5], history=young, round_=9).rejected
    assert set(judged([1.0, 1.0, 1.0, 3.5], history=old, round_=10).rejected) == {"w3"}
    assert "deviations" in str(judged([1.0, 1.0, 1.0, 3.5], history=old).rejected["w3"])
    assert not judged([1.0, 1.0, 1.0, 2.0], history=old).rejected


def test_joint_change_rejects_no_member() -> None:
    history = usual()
    for round_ in range(60):
        found = judged([8.0, 8.2, 7.9, 8.1], history=history, round_=20 + round_)
        assert not found.rejected
        history = found.history
    assert set(judged([8.0, 8.2, 7.9, 30.0], history=history, round_=99).rejected) == {"w3"}


@pytest.mark.parametrize(("n", "wrong", "aborted"), [(2, 1, True), (3, 1, False), (5, 2, True)])
def test_more_than_a_third_rejected_aborts_the_round(n: int, wrong: int, aborted: bool) -> None:
    norms = [1.0] * (n - wrong)
    bad = {f"x{i}": LossNotFinite("not finite", given=f"x{i}") for i in range(wrong)}
    if aborted:
        with pytest.raises(PeerRefused, match="more than a third"):
            judged(norms, bad=bad)
    else:
        assert set(judged(norms, bad=bad).rejected) == set(bad)


def test_where_nobody_moves_nothing_is_divided_by_zero() -> None:
    found = judged([0.0, 0.0, 0.0, 5.0])
    assert not found.rejected
    assert found.scales["w3"] == 0.0
    assert judged([0.0, 0.0, 0.0]).history.rounds == 0


def test_three_strikes_within_twenty_rounds_evict() -> None:
    history = History()
    for round_ in (0, 15, 30):
        history = judged([1, 1, 1, 9], history=history, round_=round_).history
    assert not history.evicted
    for round_ in (31, 32):
        history = judged([1, 1, 1, 9], history=history, round_=round_).history
    assert history.evicted == {"w3"}


# ------------------------------------------------------------------------ with real vectors


def vectors(n: int, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(500, generator=generator) for _ in range(n)]


def combined(xs: Sequence[Tensor], memory: NormHistory, *, round_: int = 0) -> Mean:
    given = [Share(f"w{i}", FP32.encode(x), 3.0 + i, aggregation=NORMS) for i, x in enumerate(xs)]
    return combine(given, codec=FP32, aggregation=NORMS, memory=memory, round_=round_)


def test_with_nobody_rejected_it_is_the_plain_mean_to_the_bit() -> None:
    xs = vectors(4)
    given = [Share(f"w{i}", FP32.encode(x), 3.0 + i) for i, x in enumerate(xs)]
    assert combined(xs, NormHistory()) == mean_of(given, codec=FP32)


def test_rejecting_one_of_n_equals_a_run_of_the_others() -> None:
    xs = vectors(4)
    with_it = combined([*xs, 100 * xs[0]], NormHistory())
    assert bytes(with_it.packet.data) == bytes(combined(xs, NormHistory()).packet.data)
    assert set(with_it.left_out) == {"w4"}
    assert with_it.contributors == ("w0", "w1", "w2", "w3")
    assert with_it.weight == 18.0


def test_evicted_member_is_refused_and_not_counted() -> None:
    xs, memory = vectors(4), NormHistory()
    for round_ in range(3):
        assert not combined([*xs, 100 * xs[0]], memory, round_=round_).refused
    found = combined([*xs, xs[0]], memory, round_=3)
    assert isinstance(found.refused["w4"], GroupError)
    assert "3 times within 20 rounds" in str(found.refused["w4"])
    assert bytes(found.packet.data) == bytes(combined(xs, NormHistory()).packet.data)


def test_attempts_of_one_round_count_as_one_strike() -> None:
    xs, memory = vectors(4), NormHistory()
    for _ in range(8):
        combined([*xs, 100 * xs[0]], memory, round_=5)
    assert memory.before(NORMS, 6).strikes == {"w4": (5,)}


def test_memory_is_bounded_and_forgets_what_was_not_used() -> None:
    memory = NormHistory()
    for index in range(MAX_HISTORIES + 10):
        memory.note(f"{index}", 0, History(rounds=index))
        memory.note("kept", 0, History(rounds=-1))
    assert memory.before("kept", 1).rounds == -1
    assert memory.before("0", 1) == History()
    assert memory.before(f"{MAX_HISTORIES}", 1).rounds == MAX_HISTORIES
    assert math.isfinite(memory.before("nobody", 1).log_norm)
