from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import GroupError, LossNotFinite
from atoll.reducer.mean import (
    Mean,
    Share,
    is_finite,
    mean_of,
    minority,
    result_digest,
    weighed,
)
from atoll.wire.messages import RoundPlan
from tests.tiers import examples


def share(member: str, x: Tensor, *, weight: float = 1.0, codec: str = "fp32") -> Share:
    return Share(member, make_codec(codec).encode(x, key="x"), weight)


def decoded(mean: Mean) -> Tensor:
    return make_codec(mean.packet.codec).decode(mean.packet)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.floats(0.125, 1e6, width=32), min_size=1, max_size=6),
    st.integers(0, 700),
    st.integers(0, 2**31),
)
def test_mean_is_that_of_float64(weights: list[float], size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(size, generator=generator) for _ in weights]
    shares = [share(f"w{i}", x, weight=w) for i, (x, w) in enumerate(zip(xs, weights, strict=True))]
    mean = mean_of(shares, codec=make_codec("fp32"))
    exact = torch.zeros(size, dtype=torch.float64)
    for x, weight in zip(xs, weights, strict=True):
        exact += weight * x.double()
    exact /= math.fsum(weights)
    torch.testing.assert_close(decoded(mean).double(), exact, rtol=1e-5, atol=1e-5)
    assert mean.weight == math.fsum(weights)


def test_mean_of_equal_vectors_of_equal_weight_is_that_vector() -> None:
    x = torch.randn(1000)
    for n in (1, 2, 4):
        shares = [share(f"w{i}", x, weight=0.1) for i in range(n)]
        assert torch.equal(decoded(mean_of(shares, codec=make_codec("fp32"))), x)


def test_who_has_a_strike_contributes_nothing_but_takes_part() -> None:
    shares = [share(f"w{i}", torch.full((3,), float(i)), weight=2.0) for i in range(3)]
    plan = RoundPlan("j", 0, 1, ["w0", "w1", "w2"], "relay", unweighted=["w2"])
    mean = mean_of(weighed(shares, plan, refused=()), codec=make_codec("fp32"))
    assert decoded(mean).tolist() == [0.5, 0.5, 0.5]
    assert (mean.weight, mean.contributors) == (4.0, ("w0", "w1", "w2"))
    assert [s.member for s in weighed(shares, plan, refused={"w1"})] == ["w0", "w2"]
    assert weighed(shares, plan, refused={"w0", "w1"}) == shares[2:], "there are no others"


def test_sum_runs_in_member_order() -> None:
    xs = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    one = mean_of([share(f"w{i}", x) for i, x in enumerate(xs)], codec=make_codec("fp32"))
    assert torch.equal(decoded(one), ((xs[0] + xs[1]) + xs[2]) / 3)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_contribution_that_is_not_finite_is_never_averaged(codec: str, bad: float) -> None:
    good, other = torch.randn(600), torch.randn(600)
    poisoned = torch.randn(600)
    poisoned[300] = bad
    shares = [
        share("w0", good, codec=codec),
        share("w1", poisoned, codec=codec, weight=7.0),
        share("w2", other, codec=codec),
    ]
    mean = mean_of(shares, codec=make_codec(codec))
    without = mean_of([shares[0], shares[2]], codec=make_codec(codec))
    assert bytes(mean.packet.data) == bytes(without.packet.data)
    assert mean.contributors == ("w0", "w2")
    assert mean.weight == 2.0
    assert isinstance(mean.left_out["w1"], LossNotFinite)
    assert "w1" in str(mean.left_out["w1"])


def test_infinities_that_cancel_are_found_too() -> None:
    shares = [
        share("w0", torch.tensor([math.inf])),
        share("w1", torch.tensor([-math.inf])),
        share("w2", torch.tensor([2.0])),
    ]
    assert mean_of(shares, codec=make_codec("fp32")).contributors == ("w2",)


def test_sum_that_overflows_is_an_error() -> None:
    shares = [share(f"w{i}", torch.tensor([3e38])) for i in range(2)]
    with pytest.raises(GroupError, match="larger than fp32"):
        mean_of(shares, codec=make_codec("fp32"))


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_impossible_weight_leaves_its_member_out(weight: float) -> None:
    shares = [share("w0", torch.ones(3)), share("w1", torch.zeros(3), weight=weight)]
    mean = mean_of(shares, codec=make_codec("fp32"))
    assert mean.contributors == ("w0",)
    assert torch.equal(decoded(mean), torch.ones(3))


def test_weight_zero_contributes_nothing_but_its_name() -> None:
    shares = [share("w0", torch.randn(9)), share("w1", torch.randn(9), weight=0.0)]
    mean = mean_of(shares, codec=make_codec("fp32"))
    assert mean.contributors == ("w0", "w1")
    assert torch.equal(decoded(mean), decoded(mean_of(shares[:1], codec=make_codec("fp32"))))
    with pytest.raises(GroupError, match="nothing to average"):
        mean_of(shares[1:], codec=make_codec("fp32"))


def test_minority_digests_are_odd_and_ties_favour_first() -> None:
    a, b = share("w0", torch.ones(4)), share("w1", torch.ones(4), codec="int8")
    c = share("w2", torch.ones(4), codec="int8")
    assert minority([a]) == {}
    assert list(minority([a, b])) == ["w1"]
    assert list(minority([a, b, c])) == ["w0"]
    text = str(minority([a, b, c])["w0"])
    assert "fp32" in text
    assert "int8:256" in text


def test_sizes_are_kept_in_the_result() -> None:
    packet = make_codec("fp32").encode(torch.ones(6), key="x")
    shares = [Share("w0", Packet(packet.data, packet.codec, (2, 4)), 1.0)]
    assert mean_of(shares, codec=make_codec("fp32")).packet.sizes == (2, 4)


def test_digest_depends_on_every_byte_and_name() -> None:
    digests = {
        result_digest(b"abc", ["w0", "w1"]),
        result_digest(b"abd", ["w0", "w1"]),
        result_digest(b"abc", ["w0"]),
        result_digest(b"abc", ["w0w1"]),
    }
    assert len(digests) == 4
    assert result_digest([b"a", b"bc"], ["w0"]) == result_digest(b"abc", ["w0"])


def test_finite_check_needs_no_elements() -> None:
    assert is_finite(torch.zeros(0))
    assert not is_finite(torch.tensor([0.0, math.nan]))
