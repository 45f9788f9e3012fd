"""Error feedback: nothing is lost for good, and an aborted round leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.codec.wrappers.feedback import Feedback
from atoll.errors import ConfigError

SPECS = ["feedback(int8)", "feedback(int8:1000)", "feedback(bf16)", "feedback(fp16)"]


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
def test_sent_plus_residual_equals_input(spec: str) -> None:
    codec = make_codec(spec)
    given, sent = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    for round_ in range(30):
        x = gaussian(5000, seed=round_)
        given += x
        sent += codec.decode(codec.encode(x, key="k"))
        codec.finish(committed=True)
    missing = (given - sent - codec.state_dict()["k"]).abs().max()
    # Only the sum x + e is rounded: half a unit in the last place of about 4, per round.
    assert missing < 30 * 2**-22
    assert (given - sent).abs().max() < 0.05


@pytest.mark.parametrize(
    "spec",
    [
        "fp8", "sigma8", "int4", "e3m0", "int2", "sign", "topk:0.05|int8", "randomk:0.1",
        "randomk:0.5|topk:0.2|int4", "dct:200", "by_role(int4,bf16)",
    ],
)  # fmt: skip
def test_coarse_codecs_lose_nothing_for_good(spec: str) -> None:
    codec = make_codec(f"feedback({spec})")
    given, sent = torch.zeros(9000, dtype=torch.float64), torch.zeros(9000, dtype=torch.float64)
    largest = 0.0
    for round_ in range(60):
        codec.set_round(round_)
        x = gaussian(9000, seed=round_) + 0.3
        given += x
        packet = codec.encode(x, key="k")
        sent += make_codec(packet.codec).decode(packet)
        codec.finish(committed=True)
        residual = codec.state_dict()["k"].double()
        largest = max(largest, float(residual.abs().max()))
    # What is rounded are sums with the residual, a few units in the last place per round.
    assert float((given - sent - residual).abs().max()) < 60 * largest * 2**-22
    assert float((sent / 60 - given / 60).norm() / (given / 60).norm()) < 0.5


def test_a_decay_lets_the_residual_fade() -> None:
    """E = 0.5 e + x - sent: what the largest value leaves behind halves with every round."""
    codec = make_codec("feedback:0.5(topk:0.5)")
    x = torch.tensor([4.0, 1.0])
    residuals = []
    for _ in range(3):
        codec.encode(x, key="k")
        codec.finish(committed=True)
        residuals.append(codec.state_dict()["k"].tolist())
    assert residuals == [[0.0, 1.0], [0.0, 1.5], [0.0, 1.75]]


@pytest.mark.parametrize("spec", SPECS)
def test_what_one_encoding_loses_is_exactly_the_residual(spec: str) -> None:
    codec = make_codec(spec)
    x = gaussian(5000)
    sent = codec.decode(codec.encode(x, key="k"))
    codec.finish(committed=True)
    assert torch.equal(x.double() - sent.double(), codec.state_dict()["k"].double())


def test_without_feedback_the_loss_adds_up() -> None:
    plain, fed = make_codec("int8"), make_codec("feedback(int8)")
    x = gaussian(5000)
    sums = [torch.zeros(5000), torch.zeros(5000)]
    for _ in range(50):
        for codec, total in zip((plain, fed), sums, strict=True):
            codec.decode_add(codec.encode(x), out=total)
            codec.finish(committed=True)
    errors = [float((total - 50 * x).norm()) for total in sums]
    assert errors[1] < errors[0] / 20


def test_aborted_round_is_as_if_nothing_had_been_sent() -> None:
    disturbed, calm = make_codec("feedback(int8)"), make_codec("feedback(int8)")
    for codec in (disturbed, calm):
        codec.encode(gaussian(1000, seed=1))
        codec.finish(committed=True)
    disturbed.encode(gaussian(1000, seed=2))
    disturbed.finish(committed=False)
    retried, expected = (c.encode(gaussian(1000, seed=3)) for c in (disturbed, calm))
    assert bytes(retried.data) == bytes(expected.data)


def test_encoding_before_the_verdict_keeps_the_residual() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000, seed=1))
    codec.finish(committed=True)
    first = bytes(codec.encode(gaussian(1000, seed=2)).data)
    assert bytes(codec.encode(gaussian(1000, seed=2)).data) == first


def test_settling_twice_changes_nothing() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000))
    codec.finish(committed=True)
    before = codec.state_dict()["x"]
    codec.finish(committed=True)
    codec.finish(committed=False)
    assert torch.equal(codec.state_dict()["x"], before)


def test_keys_have_residuals_of_their_own() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000), key="a")
    codec.encode(gaussian(300), key="b")
    codec.finish(committed=True)
    assert {key: len(value) for key, value in codec.state_dict().items()} == {"a": 1000, "b": 300}


def test_saved_state_continues_bit_for_bit() -> None:
    codec = make_codec("feedback(int8)")
    for seed in range(3):
        codec.encode(gaussian(1000, seed=seed))
        codec.finish(committed=True)
    other = make_codec("feedback(int8)")
    other.load_state_dict(codec.state_dict())
    packets = [c.encode(gaussian(1000, seed=9)) for c in (codec, other)]
    assert bytes(packets[0].data) == bytes(packets[1].data)


def test_saved_state_excludes_provisional_residuals() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000))
    assert codec.state_dict() == {}
    codec.finish(committed=True)
    saved = codec.state_dict()
    before = saved["x"].clone()
    for seed in range(1, 4):
        codec.encode(gaussian(1000, seed=seed))
        codec.finish(committed=True)
    assert torch.equal(saved["x"], before)


def test_vector_that_is_not_finite_does_not_poison_the_residual() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000))
    codec.finish(committed=True)
    before = codec.state_dict()["x"]
    broken = gaussian(1000)
    broken[3] = torch.nan
    assert codec.decode(codec.encode(broken))[:256].isnan().all()
    codec.finish(committed=True)
    assert torch.equal(codec.state_dict()["x"], before)


def test_feedback_around_fp32_changes_nothing() -> None:
    plain, fed = make_codec("fp32"), make_codec("feedback(fp32)")
    for seed in range(3):
        x = gaussian(1000, seed=seed)
        assert torch.equal(plain.decode(plain.encode(x)), fed.decode(fed.encode(x)))
        fed.finish(committed=True)
    assert not fed.state_dict()["x"].any()


def test_vector_of_another_size_under_the_same_key_is_refused() -> None:
    codec = make_codec("feedback(int8)")
    codec.encode(gaussian(1000))
    codec.finish(committed=True)
    with pytest.raises(ConfigError, match="another size"):
        codec.encode(gaussian(999))


def test_vectors_are_reused_and_never_pile_up() -> None:
    codec = Feedback(make_codec("int8"))
    for seed in range(10):
        codec.encode(gaussian(1000, seed=seed))
        codec.finish(committed=seed % 3 != 0)
        assert len(codec._spare) <= 2
