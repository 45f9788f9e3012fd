"""int8 in blocks, to the bit; and what else a codec's format promises beyond the common suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec import Packet, make_codec
from atoll.codec.quantized.blockwise import BlockwiseInt8
from atoll.errors import ConfigError
from tests.tiers import examples


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [64, 256, 1000])
def test_strip_size_does_not_change_a_bit(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(100_003)
    codec = BlockwiseInt8(block)
    packet, total = codec.encode(x), gaussian(100_003, seed=1)
    codec.decode_add(packet, out=total, weight=0.7)
    for rows in (1, 3, 10_000):
        monkeypatch.setattr(codec, "_rows", rows)
        again = gaussian(100_003, seed=1)
        assert bytes(codec.encode(x).data) == bytes(packet.data)
        codec.decode_add(packet, out=again, weight=0.7)
        assert torch.equal(again, total)


def test_int8_equals_the_formula_written_plainly() -> None:
    x = gaussian(256 * 130 + 17)
    packet = BlockwiseInt8(256).encode(x)
    padded = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    scales = padded.abs().amax(1) / 127
    values = torch.round(padded * (1 / scales)[:, None]).to(torch.int8).flatten()[: len(x)]
    expected = scales.numpy().astype("<f4").tobytes() + values.numpy().tobytes()
    assert bytes(packet.data) == expected


def test_int8_values_on_the_grid_are_encoded_exactly() -> None:
    codec = BlockwiseInt8(256)
    once = codec.decode(codec.encode(gaussian(10_000)))
    assert torch.equal(codec.decode(codec.encode(once)), once)


def test_int8_zero_blocks_decode_to_zeros() -> None:
    x = gaussian(1024)
    x[256:512] = 0.0
    decoded = BlockwiseInt8(256).decode(BlockwiseInt8(256).encode(x))
    assert torch.equal(decoded[256:512], torch.zeros(256))
    assert (decoded[:256] != 0).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 300, 40_000, 40_199])
def test_int8_non_finite_value_spares_other_blocks(bad: float, place: int) -> None:
    x = gaussian(40_200)
    codec = BlockwiseInt8(256)
    clean = codec.decode(codec.encode(x))
    x[place] = bad
    decoded = codec.decode(codec.encode(x))
    block = slice(place // 256 * 256, place // 256 * 256 + 256)
    assert decoded[block].isnan().all()
    decoded[block] = clean[block]
    assert torch.equal(decoded, clean)


def test_fp16_overflow_decodes_to_infinity() -> None:
    codec = make_codec("fp16")
    assert codec.decode(codec.encode(torch.tensor([70_000.0]))).isinf().all()


@pytest.mark.parametrize("magnitude", [3.4e38, 1e30, 1.0, 1e-7, 1e-20, 1e-34, 2e-36])
def test_int8_is_as_precise_at_every_magnitude(magnitude: float) -> None:
    x = torch.linspace(-1, 1, 257)[:-1] * magnitude
    decoded = BlockwiseInt8(256).decode(BlockwiseInt8(256).encode(x))
    assert torch.isfinite(decoded).all()
    error = (decoded.double() - x.double()).abs().max() / magnitude
    assert error <= 0.5 / 127 * 1.001


@pytest.mark.parametrize("magnitude", [1e-37, 1e-40, 1e-45])
def test_int8_block_of_subnormals_decodes_to_zeros(magnitude: float) -> None:
    x = torch.full((300,), magnitude)
    decoded = BlockwiseInt8(256).decode(BlockwiseInt8(256).encode(x))
    assert torch.equal(decoded, torch.zeros(300))


def test_int8_decodes_the_largest_float_to_something_finite() -> None:
    x = torch.full((256,), torch.finfo(torch.float32).max)
    decoded = BlockwiseInt8(256).decode(BlockwiseInt8(256).encode(x))
    assert torch.isfinite(decoded).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70),
    block=st.integers(8, 40),
)
def test_int8_error_is_at_most_half_a_step_of_its_block(values: list[float], block: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codec = BlockwiseInt8(block)
    decoded = codec.decode(codec.encode(x)).double()
    for start in range(0, len(x), block):
        part = x[start : start + block].double()
        step = part.abs().max() / 127
        allowed = step * 0.5 * 1.0001 + 2e-36 * float(part.abs().max() < 2e-36)
        assert ((decoded[start : start + block] - part).abs() <= allowed).all()


def test_int8_is_a_quarter_of_fp32_with_error_below_1_percent() -> None:
    x = gaussian(1_000_000)
    codec = make_codec("int8")
    error = (codec.decode(codec.encode(x)) - x).norm() / x.norm()
    assert error < 0.0075
    assert codec.nbytes(1_000_000) == 1_000_000 + 4 * 3907


def test_several_tensors_in_one_packet_decode_as_one_vector() -> None:
    codec = make_codec("int8")
    x = gaussian(300)
    packet = codec.encode(x)
    assert torch.equal(
        codec.decode(Packet(packet.data, packet.codec, (100, 200))), codec.decode(packet)
    )


@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_codecs_without_feedback_keep_no_state(spec: str) -> None:
    codec = make_codec(spec)
    codec.encode(gaussian(100))
    codec.finish(committed=True)
    assert codec.state_dict() == {}
    codec.load_state_dict({})
    with pytest.raises(ConfigError, match="keeps no state"):
        codec.load_state_dict({"x": torch.zeros(1)})


def test_scales_lie_at_the_start_little_endian() -> None:
    x = torch.cat([torch.full((256,), 127.0), torch.full((10,), -254.0)])
    data = bytes(BlockwiseInt8(256).encode(x).data)
    assert np.frombuffer(data, "<f4", count=2).tolist() == [1.0, 2.0]
    assert np.frombuffer(data, np.int8, offset=8).tolist() == [127] * 256 + [-127] * 10
