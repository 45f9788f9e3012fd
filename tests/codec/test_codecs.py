"""What every codec promises, and what each adds."""

from __future__ import annotations

import socket
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec import Packet, make_codec
from atoll.codec.blockwise import BlockwiseInt8
from atoll.codec.cast import STRIP
from atoll.errors import ConfigError, WireError

SPECS = ["fp32", "fp16", "bf16", "int8", "int8:64", "int8:1000", "feedback(int8)", "feedback(bf16)"]
SIZES = [0, 1, 7, 255, 256, 257, STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 3, 100_003]
BOUNDS = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.5 / 127 * 1.001}
"""Largest error: relative to the element, or for int8 to the largest of its block."""


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("elements", SIZES)
def test_packet_has_exactly_the_promised_bytes_and_decodes_within_the_bound(
    spec: str, elements: int
) -> None:
    codec = make_codec(spec)
    x = gaussian(elements)
    before = x.clone()
    packet = codec.encode(x, key="k")
    assert torch.equal(x, before)
    assert packet.codec == codec.base.spec
    assert packet.sizes == (elements,)
    assert len(packet.data) == memoryview(packet.data).nbytes == codec.nbytes(elements)
    decoded = make_codec(packet.codec).decode(packet)
    assert decoded.shape == (elements,)
    assert decoded.dtype == torch.float32
    base = codec.base.spec.partition(":")[0]
    if elements:
        reference = x.abs().max() if base == "int8" else x.abs()
        below_normal = 2**-25 if base == "fp16" else 0.0
        assert ((decoded - x).abs() <= BOUNDS[base] * reference + below_normal).all()


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_twice_and_decoding_anywhere_give_the_same_bits(spec: str) -> None:
    x = gaussian(70_001)
    one, two = make_codec(spec).encode(x), make_codec(spec).encode(x.clone())
    assert bytes(one.data) == bytes(two.data)
    # As it arrives from a socket: read-only, at an odd address.
    shifted = memoryview(b"x" + bytes(one.data))[1:]
    moved = Packet(shifted, one.codec, one.sizes)
    base = make_codec(one.codec)
    out = torch.full((70_001,), torch.nan)
    assert base.decode(moved, out=out) is out
    assert torch.equal(base.decode(one), out)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("threads", [2, 3])
def test_thread_count_does_not_change_a_bit(spec: str, threads: int) -> None:
    x = gaussian(200_003)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            codec = make_codec(spec)
            packet = codec.encode(x)
            total = gaussian(200_003, seed=1)
            codec.decode_add(packet, out=total, weight=0.3)
            results.append((bytes(packet.data), codec.decode(packet), total))
    finally:
        torch.set_num_threads(before)
    for (data, decoded, total), (data_2, decoded_2, total_2) in pairwise(results):
        assert data == data_2
        assert torch.equal(decoded, decoded_2)
        assert torch.equal(total, total_2)


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


@pytest.mark.parametrize("spec", SPECS)
def test_decode_add_equals_decode_then_add(spec: str) -> None:
    codec = make_codec(spec)
    x, start = gaussian(70_001), gaussian(70_001, seed=1)
    packet = codec.encode(x)
    plain, weighted = start.clone(), start.clone()
    codec.decode_add(packet, out=plain)
    assert torch.equal(plain, start + codec.decode(packet))
    codec.decode_add(packet, out=weighted, weight=0.37)
    torch.testing.assert_close(weighted, start + 0.37 * codec.decode(packet), rtol=0, atol=1e-6)


def test_int8_equals_the_formula_written_plainly() -> None:
    x = gaussian(256 * 130 + 17)
    packet = BlockwiseInt8(256).encode(x)
    padded = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    scales = padded.abs().amax(1) / 127
    values = torch.round(padded * (1 / scales)[:, None]).to(torch.int8).flatten()[: len(x)]
    expected = scales.numpy().astype("<f4").tobytes() + values.numpy().tobytes()
    assert bytes(packet.data) == expected


def test_int8_values_that_are_already_on_the_grid_survive_a_second_encoding() -> None:
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
def test_int8_shows_a_value_that_is_not_finite_and_keeps_the_other_blocks(
    bad: float, place: int
) -> None:
    x = gaussian(40_200)
    codec = BlockwiseInt8(256)
    clean = codec.decode(codec.encode(x))
    x[place] = bad
    decoded = codec.decode(codec.encode(x))
    block = slice(place // 256 * 256, place // 256 * 256 + 256)
    assert decoded[block].isnan().all()
    decoded[block] = clean[block]
    assert torch.equal(decoded, clean)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_no_codec_hides_a_value_that_is_not_finite(spec: str, bad: float) -> None:
    x = gaussian(1000)
    x[500] = bad
    codec = make_codec(spec)
    assert not torch.isfinite(codec.decode(codec.encode(x))[500])


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


@settings(max_examples=60, deadline=None)
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


def test_int8_costs_a_quarter_of_fp32_and_its_error_is_below_one_percent() -> None:
    x = gaussian(1_000_000)
    codec = make_codec("int8")
    error = (codec.decode(codec.encode(x)) - x).norm() / x.norm()
    assert error < 0.0075
    assert codec.nbytes(1_000_000) == 1_000_000 + 4 * 3907


@pytest.mark.parametrize("spec", SPECS)
def test_a_socket_takes_packet_data_as_it_is(spec: str) -> None:
    packet = make_codec(spec).encode(gaussian(100))
    left, right = socket.socketpair()
    with left, right:
        left.sendall(packet.data)
        left.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: right.recv(65_536), b""))
    view = memoryview(packet.data)
    assert received == bytes(packet.data)
    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)
    assert view.contiguous


@pytest.mark.parametrize("spec", ["fp32", "bf16", "int8"])
def test_packet_owns_its_memory(spec: str) -> None:
    x = gaussian(1000)
    packet = make_codec(spec).encode(x)
    before = bytes(packet.data)
    x.zero_()
    assert bytes(packet.data) == before


@pytest.mark.parametrize("spec", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_packet_of_wrong_length_is_refused(spec: str, change: int) -> None:
    codec = make_codec(spec)
    packet = codec.encode(gaussian(1000))
    data = (bytes(packet.data) + b"1234")[: len(packet.data) + change]
    with pytest.raises(WireError, match="wrong length"):
        codec.decode(Packet(data, packet.codec, packet.sizes))
    with pytest.raises(WireError, match="wrong length"):
        codec.decode_add(Packet(data, packet.codec, packet.sizes), out=torch.zeros(1000))


def test_packet_of_negative_size_is_refused() -> None:
    with pytest.raises(WireError, match="wrong length"):
        make_codec("fp32").decode(Packet(b"", "fp32", (5, -5)))


def test_packet_of_another_codec_is_refused() -> None:
    with pytest.raises(WireError, match="wrong codec"):
        make_codec("int8:128").decode(make_codec("int8").encode(gaussian(100)))


def test_several_tensors_in_one_packet_decode_as_one_vector() -> None:
    codec = make_codec("int8")
    x = gaussian(300)
    packet = codec.encode(x)
    assert torch.equal(
        codec.decode(Packet(packet.data, packet.codec, (100, 200))), codec.decode(packet)
    )


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2, 2),
        torch.zeros(8)[::2],
        torch.zeros(4, dtype=torch.int32),
    ],
)
@pytest.mark.parametrize("spec", ["fp32", "int8", "feedback(int8)"])
def test_anything_but_a_flat_float32_vector_is_refused(spec: str, x: Tensor) -> None:
    with pytest.raises(ConfigError, match="contiguous float32 vector"):
        make_codec(spec).encode(x)


def test_output_of_wrong_size_is_refused() -> None:
    codec = make_codec("int8")
    packet = codec.encode(gaussian(100))
    for out in (torch.zeros(99), torch.zeros(100, dtype=torch.float64)):
        with pytest.raises(ConfigError, match="as the output"):
            codec.decode(packet, out=out)
        with pytest.raises(ConfigError, match="as the output"):
            codec.decode_add(packet, out=out)


def test_encode_takes_a_parameter_that_requires_a_gradient() -> None:
    x = gaussian(1000).requires_grad_()
    decoded = make_codec("int8").decode(make_codec("int8").encode(x))
    assert not decoded.requires_grad


@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_codecs_without_feedback_keep_no_state(spec: str) -> None:
    codec = make_codec(spec)
    codec.encode(gaussian(100))
    codec.settle(committed=True)
    assert codec.state_dict() == {}
    codec.load_state_dict({})
    with pytest.raises(ConfigError, match="keeps no state"):
        codec.load_state_dict({"x": torch.zeros(1)})


def test_scales_lie_at_the_start_little_endian() -> None:
    x = torch.cat([torch.full((256,), 127.0), torch.full((10,), -254.0)])
    data = bytes(BlockwiseInt8(256).encode(x).data)
    assert np.frombuffer(data, "<f4", count=2).tolist() == [1.0, 2.0]
    assert np.frombuffer(data, np.int8, offset=8).tolist() == [127] * 256 + [-127] * 10
