"""EF21: everybody keeps the sum of what was sent, and members may come and go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.codec.base import Codec
from atoll.errors import ConfigError

SPECS = ["ef21(topk:0.1)", "ef21(sign)", "ef21(int4)", "ef21(randomk:0.1)", "ef21(topk:0.1|int8)"]


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def hold(
    codecs: dict[str, Codec], vectors: dict[str, Tensor], *, number: int, weight: float = 1.0
) -> Tensor:
    """Hold one committed round of these members and return what all take it to mean."""
    size = len(next(iter(vectors.values())))
    total, results = torch.zeros(size), []
    for name, codec in codecs.items():
        codec.set_round(number)
        packet = codec.encode(vectors[name], key="k")
        make_codec(packet.codec).decode_add(packet, out=total)
    mean = total / len(codecs)
    for codec in codecs.values():
        codec.finish(committed=True)
        results.append(
            codec.restore_mean(
                mean, key="k", contributors=tuple(codecs), weight=weight * len(codecs)
            )
        )
    assert all(torch.equal(results[0], other) for other in results)
    return results[0]


def members(spec: str, *names: str) -> dict[str, Codec]:
    return {name: make_codec(spec) for name in names}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.every(3)
def test_constant_vectors_converge_to_their_mean(spec: str) -> None:
    codecs = members(spec, "a", "b", "c")
    vectors = {name: gaussian(3000, seed=i) for i, name in enumerate(codecs)}
    mean = torch.stack(list(vectors.values())).mean(0)
    errors = []
    for number in range(120):
        found = hold(codecs, vectors, number=number)
        errors.append(float((found - mean).norm() / mean.norm()))
    assert errors[-1] < 0.03
    assert errors[-1] < errors[0] / 10


def test_lossless_codec_inside_gives_the_mean_of_every_round() -> None:
    codecs = members("ef21(fp32)", "a", "b")
    for number in range(4):
        vectors = {name: gaussian(500, seed=10 * number + i) for i, name in enumerate(codecs)}
        found = hold(codecs, vectors, number=number)
        assert torch.allclose(found, (vectors["a"] + vectors["b"]) / 2, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.every(3)
def test_descent_converges_where_plain_compression_stalls(spec: str) -> None:
    """Quadratics that pull each member elsewhere: the gradients never vanish, their mean does."""
    targets = {name: 3 * gaussian(200, seed=i) for i, name in enumerate("abc")}
    best = torch.stack(list(targets.values())).mean(0)
    ends = []
    for chosen in (spec, spec.removeprefix("ef21(").removesuffix(")")):
        codecs, x = members(chosen, *targets), torch.zeros(200)
        for number in range(300):
            gradients = {name: x - target for name, target in targets.items()}
            x = x - 0.05 * hold(codecs, gradients, number=number)
        ends.append(float((x - best).norm() / best.norm()))
    assert ends[0] < 1e-2
    if "randomk" not in spec:  # unbiased alone: noise, but no standstill
        assert ends[1] > 2 * ends[0]


def test_late_member_begins_at_the_sum() -> None:
    codecs = members("ef21(topk:0.2)", "a", "b")
    vectors = {name: gaussian(1000, seed=i) for i, name in enumerate("abc")}
    for number in range(30):
        hold(codecs, {n: vectors[n] for n in "ab"}, number=number)
    late = make_codec("ef21(topk:0.2)")
    shared = {k: v for k, v in codecs["a"].state_dict().items() if k.startswith("shared.")}
    late.load_state_dict(shared)
    before = torch.stack([vectors["a"], vectors["b"]]).mean(0)
    all_three = codecs | {"c": late}
    first = hold(all_three, vectors, number=30)
    # No leap by what the newcomer never sent: a third of its difference at most.
    assert float((first - before).norm()) < 0.6 * float((vectors["c"] - before).norm())
    for number in range(31, 90):
        last = hold(all_three, vectors, number=number)
    mean = torch.stack(list(vectors.values())).mean(0)
    assert float((last - mean).norm() / mean.norm()) < 1e-2


@pytest.mark.parametrize("change", ["leaves", "weighs"])
def test_sum_is_right_again_after_the_contributors_change(change: str) -> None:
    codecs = members("ef21(topk:0.2)", "a", "b", "c")
    vectors = {name: gaussian(1000, seed=i) for i, name in enumerate("abc")}
    for number in range(20):
        hold(codecs, vectors, number=number)
    weight = 2.0
    if change == "leaves":
        del codecs["c"]
        weight = 1.0
    for number in range(20, 90):
        found = hold(codecs, {n: vectors[n] for n in codecs}, number=number, weight=weight)
    mean = torch.stack([vectors[name] for name in codecs]).mean(0)
    assert float((found - mean).norm() / mean.norm()) < 1e-2


def test_who_was_left_out_of_a_round_stands_where_all_stand() -> None:
    codecs = members("ef21(topk:0.2)", "a", "b")
    vectors = {name: gaussian(1000, seed=i) for i, name in enumerate("ab")}
    hold(codecs, vectors, number=0)
    codecs["b"].encode(vectors["b"], key="k")
    codecs["b"].finish(committed=False)
    packet = codecs["a"].encode(vectors["a"], key="k")
    codecs["a"].finish(committed=True)
    mean = make_codec(packet.codec).decode(packet)
    for codec in codecs.values():
        codec.restore_mean(mean, key="k", contributors=("a",), weight=1.0)
    states = [codec.state_dict() for codec in codecs.values()]
    assert [sorted(state) for state in states] == [["shared.ef21.mark.k", "shared.ef21.sum.k"]] * 2
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_alone_the_sum_is_the_own_vector() -> None:
    codec = make_codec("ef21(sign)")
    x = gaussian(100)
    assert codec.restore_mean(x, key="k", contributors=("a",), weight=1.0, alone=True) is x
    assert torch.equal(codec.state_dict()["shared.ef21.sum.k"], x)


def test_aborted_round_is_as_if_nothing_had_been_sent() -> None:
    disturbed, calm = members("ef21(int4)", "a"), members("ef21(int4)", "a")
    for codecs in (disturbed, calm):
        hold(codecs, {"a": gaussian(500, seed=1)}, number=0)
    disturbed["a"].encode(gaussian(500, seed=2), key="k")
    disturbed["a"].finish(committed=False)
    results = [hold(c, {"a": gaussian(500, seed=3)}, number=1) for c in (disturbed, calm)]
    assert torch.equal(*results)


def test_saved_state_continues_bit_for_bit() -> None:
    codecs = members("ef21(topk:0.1)", "a", "b")
    for number in range(3):
        hold(codecs, {n: gaussian(500, seed=i) for i, n in enumerate("ab")}, number=number)
    again = members("ef21(topk:0.1)", "a", "b")
    for name, codec in again.items():
        codec.load_state_dict(codecs[name].state_dict())
    vectors = {n: gaussian(500, seed=7 + i) for i, n in enumerate("ab")}
    assert torch.equal(*(hold(c, vectors, number=3) for c in (codecs, again)))


def test_strategy_without_memory_of_sums_is_refused() -> None:
    codec = make_codec("ef21(int8)")
    codec.encode(gaussian(100), key="k")
    codec.finish(committed=True)
    with pytest.raises(ConfigError, match=r"uses their mean as the whole.*feedback\(int8:256\)"):
        codec.encode(gaussian(100), key="k")


def test_state_of_another_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="of another codec"):
        make_codec("ef21(int8)").load_state_dict({"delta": torch.zeros(3)})
