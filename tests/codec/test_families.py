"""What each family of codecs adds to the common suite: its own levels, choices and randomness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec import Packet, make_codec
from atoll.codec.quantized.packing import (
    look_up_table,
    pack,
    packed_bytes,
    unpack,
    unpacked_codes,
)
from atoll.codec.quantized.scales import read_scales, scales_bytes, write_scales
from atoll.codec.seeds import mixed, permutation
from atoll.codec.sparse.positions import positions_bytes, read_positions, write_positions
from atoll.codec.sparse.randomk import WIDTH, chosen_positions
from atoll.codec.sparse.topk import largest
from atoll.errors import WireError
from tests.tiers import examples


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def once(spec: str, x: Tensor, *, round_: int = 0) -> Tensor:
    codec = make_codec(spec)
    codec.set_round(round_)
    packet = codec.encode(x)
    return make_codec(packet.codec).decode(packet)


# ------------------------------------------------------------------------- packing


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 17, 1000])
def test_packed_codes_come_back(bits: int, count: int) -> None:
    codes = np.random.default_rng(count).integers(0, 2**bits, count).astype(np.uint8)
    padded = np.zeros(-(-count // 8) * 8, dtype=np.uint8)
    padded[:count] = codes
    data = np.empty(packed_bytes(count, bits), dtype=np.uint8)
    pack(padded, bits=bits, out=data)
    table = look_up_table(np.arange(2**bits, dtype=np.float32), bits=bits)
    found = np.empty(unpacked_codes(len(data), bits), dtype=np.float32)
    unpack(data, table=table, out=found)
    assert found[:count].tolist() == codes.tolist()


def test_first_code_lies_in_the_lowest_bits() -> None:
    data = np.empty(1, dtype=np.uint8)
    pack(np.array([1, 2, 0, 0, 0, 0, 0, 0], dtype=np.uint8), bits=4, out=data)
    assert data[0] == 0x21


@pytest.mark.parametrize("largest_scale", [1e30, 1.0, 1e-7, 1e-25])
def test_scales_keep_eleven_bits_over_nine_decades(largest_scale: float) -> None:
    scales = torch.logspace(0, -8.5, 200) * largest_scale
    data = bytearray(scales_bytes(200))
    read = write_scales(scales, out=memoryview(data))
    assert torch.equal(read, read_scales(data, 200))
    assert ((read - scales).abs() <= scales * 2**-11 * 1.001).all()


def test_scales_rounded_upwards_are_never_smaller() -> None:
    scales = gaussian(1000).abs()
    read = write_scales(scales, out=memoryview(bytearray(scales_bytes(1000))), upwards=True)
    assert (read >= scales).all()
    assert ((read - scales) <= scales * 2**-10 * 1.001).all()


# ------------------------------------------------------------------- e3m0 and others


def test_e3m0_keeps_its_fifteen_values_exactly() -> None:
    levels = torch.tensor([0.0, 1, 2, 4, 8, 16, 32, 64])
    x = torch.cat([levels, -levels[1:], torch.tensor([64.0])]) * 0.03125
    assert torch.equal(once("e3m0", x), x)


@settings(max_examples=examples(50), deadline=None)
@given(values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40))
def test_e3m0_rounds_to_nearest_and_ties_away_from_zero(
    values: list[float],
) -> None:
    x = torch.tensor([*values, 1.0], dtype=torch.float32)
    found = once("e3m0:64", x).double() * 64
    levels = torch.tensor([0.0, 1, 2, 4, 8, 16, 32, 64], dtype=torch.float64)
    distances = (x.double().abs()[:, None] * 64 - levels).abs()
    nearest = levels.flip(0)[distances.flip(1).argmin(1)]
    assert torch.equal(found.abs(), nearest)
    assert ((found.sign() == x.double().sign()) | (found == 0)).all()


def test_e3m0_error_is_at_most_a_third_within_its_range() -> None:
    x = gaussian(100_000)
    found = once("e3m0", x)
    inside = x.abs() >= x.abs().max() / 64
    assert ((found - x).abs()[inside] <= x.abs()[inside] / 3 * 1.001).all()


@pytest.mark.parametrize("unit", [0.5, 1.5, 3.0, 6.0, 12.0, 24.0, 48.0])
def test_e3m0_ties_go_away_from_zero(unit: float) -> None:
    x = torch.tensor([unit, -unit, 64.0])
    below = torch.nextafter(x, torch.zeros(3))
    found, under = once("e3m0", x), once("e3m0", torch.cat([below[:2], x[2:]]))
    assert found[0] == -found[1]
    assert found[0] > unit
    assert under[0] < unit


@pytest.mark.parametrize(("spec", "levels"), [("int4", 7), ("int6", 31)])
def test_integers_are_off_by_at_most_half_a_step(spec: str, levels: int) -> None:
    x = gaussian(2560)
    step = x.view(-1, 256).abs().amax(1, keepdim=True) / levels
    assert ((once(spec, x) - x).view(-1, 256).abs() <= step * 0.5005).all()


def test_int2_overshoots_by_less_than_its_level() -> None:
    sparse = torch.zeros(1024)
    sparse[::100] = gaussian(11)
    found = once("int2", sparse)
    assert torch.equal(found[sparse == 0], sparse[sparse == 0])
    assert ((found - sparse).norm() / sparse.norm()) < 0.6


def test_fp8_is_precise_where_int8_is_not() -> None:
    x = torch.cat([torch.tensor([1.0]), torch.full((255,), 1e-3)])
    errors = [float((once(spec, x) - x)[1:].abs().max()) for spec in ("fp8", "int8")]
    assert errors[0] <= 1e-3 / 16 * 1.01
    assert errors[1] > 5e-4


def test_fp8_table_is_that_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    table = make_codec("fp8").levels  # type: ignore[attr-defined]
    assert (table[:127] == codes.view(torch.float8_e4m3fn).float().numpy()[:127]).all()
    assert table[0x7E] == 448.0


def test_sign_sends_the_mean_magnitude() -> None:
    x = gaussian(256)
    found = once("sign", x)
    assert torch.equal(found.sign(), x.sign())
    assert float(found.abs().max()) == pytest.approx(float(x.abs().mean()), rel=1e-3)


# ------------------------------------------------------------------------------ qsgd


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_is_unbiased_and_its_variance_is_within_the_bound(levels: int) -> None:
    x = gaussian(256)
    codec, rounds = make_codec(f"qsgd:{levels}"), 2000
    found = torch.empty(rounds, 256, dtype=torch.float64)
    for round_ in range(rounds):
        codec.set_round(round_)
        found[round_] = codec.decode(codec.encode(x))
    square = float(x.double().norm() ** 2)
    bound = min(256 / levels**2, 256**0.5 / levels) * square
    variance = float((found - x.double()).square().sum(1).mean())
    assert variance <= bound * 1.05
    deviation = float((found.mean(0) - x.double()).norm())
    assert deviation <= 1.5 * (variance / rounds) ** 0.5


def test_qsgd_draws_differ_by_round_key_and_vector() -> None:
    x = gaussian(5000)
    codec = make_codec("qsgd:7")

    def drawn(*, round_: int = 0, key: str = "a", change: float = 0.0) -> bytes:
        codec.set_round(round_)
        y = x.clone()
        y[0] += change
        return bytes(codec.encode(y, key=key).data)[200:]

    assert drawn() == drawn()
    assert len({drawn(), drawn(round_=1), drawn(key="b"), drawn(change=1e-6)}) == 4


# -------------------------------------------------------------------- sparse vectors


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), elements=st.integers(1, 3000), density=st.floats(0.001, 1.0))
def test_positions_come_back_in_the_promised_bytes(
    data: st.DataObject, elements: int, density: float
) -> None:
    count = max(1, int(elements * density))
    seed = data.draw(st.integers(0, 1000))
    positions = np.sort(np.random.default_rng(seed).permutation(elements)[:count])
    out = np.empty(positions_bytes(elements, count), dtype=np.uint8)
    write_positions(positions, elements=elements, out=out)
    assert np.array_equal(read_positions(out, elements=elements, count=count), positions)


def test_positions_take_about_a_bit_more_than_they_must() -> None:
    """The least is log2 of the number of choices: 7.4 bits each of 64 in 4096."""
    for elements, count, least in [(4096, 64, 7.36), (1_000_000, 10_000, 8.07)]:
        bits = 8 * positions_bytes(elements, count) / count
        assert least < bits < least + 1.5


def test_positions_of_first_and_last_elements_come_back() -> None:
    positions = np.array([0, 65_535, 65_536, 131_072, 199_999])
    out = np.empty(positions_bytes(200_000, 5), dtype=np.uint8)
    write_positions(positions, elements=200_000, out=out)
    assert np.array_equal(read_positions(out, elements=200_000, count=5), positions)


@pytest.mark.parametrize("damage", ["twice", "beyond", "missing", "bitmap"])
def test_damaged_positions_are_refused(damage: str) -> None:
    elements, positions = 70_000, np.array([69_000, 69_001, 69_002])
    if damage == "bitmap":
        elements, positions = 64, np.arange(32)
    if damage == "beyond":
        positions = np.array([69_000, 69_001, 81_000])
    count = len(positions)
    out = np.empty(positions_bytes(elements, count), dtype=np.uint8)
    # 90,000 elements have the layout of 70,000.
    write_positions(positions, elements=90_000 if damage == "beyond" else elements, out=out)
    if damage == "twice":
        out[:6] = 0  # the lower bits of all three
    elif damage == "missing":
        out[6:] = 0
    elif damage == "bitmap":
        out[7] = 0xFF
    with pytest.raises(WireError, match="positions in a sparse packet"):
        read_positions(out, elements=elements, count=count)


def test_equal_magnitudes_of_a_chunk_are_taken_from_the_front() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0])
    codec = make_codec("topk:0.5:4")
    found = codec.decode(codec.encode(x))
    assert found.tolist() == [0.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]


def test_every_chunk_sends_the_same_number_of_values() -> None:
    x = gaussian(10 * 512 + 100) * torch.arange(5220).div(512).floor().neg().exp()
    codec = make_codec("topk:0.125:512")
    sent = codec.decode(codec.encode(x)) != 0
    counts = [int(part.sum()) for part in torch.split(sent, 512)]
    assert counts == [64] * 10 + [13]


@settings(max_examples=examples(60), deadline=None)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=60), share=st.floats(0.01, 1.0))
def test_topk_takes_the_largest_and_of_equal_ones_the_first(
    values: list[int], share: float
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    count = max(1, int(len(values) * share))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert largest(x, count).tolist() == sorted(order[:count])


def test_topk_keeps_the_most_energy() -> None:
    x = gaussian(5000)
    assert torch.equal(once("topk:1", x), x)
    kept = float(once("topk:0.1", x).norm())
    for seed in range(5):
        other = np.random.default_rng(seed).permutation(5000)[:500]
        assert kept >= float(x[torch.from_numpy(other)].norm())


def test_topk_weighs_what_it_says() -> None:
    sparse, dense = make_codec("topk:0.01"), make_codec("topk:0.1|int8")
    # 6 lower bits each, and 10,000 + 15,624 upper ones; of the dense one 3, and 224,999.
    assert sparse.nbytes(1_000_000) == 7_500 + 3_203 + 4 * 10_000
    assert dense.nbytes(1_000_000) == 37_500 + 28_125 + make_codec("int8").nbytes(100_000)


def test_randomk_is_unbiased_and_its_plain_form_keeps_values() -> None:
    x = gaussian(5000)
    total = torch.stack([once("randomk:0.1", x, round_=r).double() for r in range(10)]).sum(0)
    # In 10 rounds everything came once, but for the few that fill up the last round's share.
    close = torch.isclose(total / 10, x.double(), rtol=0.01)
    assert int((~close).sum()) <= 4 + 6
    plain = once("randomk:0.1:plain", x, round_=4)
    assert torch.equal(plain[plain != 0], x[plain != 0])


@pytest.mark.parametrize(("width", "count"), [(WIDTH, 410), (WIDTH, 41), (100, 10), (7, 3), (5, 5)])
def test_randomk_visits_every_position_within_a_cycle(width: int, count: int) -> None:
    cycle = -(-width // count)
    for start in (0, 5 * cycle):
        seen = [chosen_positions(width, count, start + r) for r in range(cycle)]
        assert all(len(part) == count for part in seen)
        assert set(np.concatenate(seen)) == set(range(width))


def test_randomk_positions_follow_from_the_round_alone() -> None:
    x, codec = gaussian(3 * WIDTH + 100), make_codec("randomk:0.05:plain")
    codec.set_round(17)
    whole = codec.decode(codec.encode(x))
    parts = [codec.decode(codec.encode(part)) for part in torch.split(x, 2 * WIDTH)]
    assert torch.equal(torch.cat(parts), whole)


def test_randomk_mean_is_exact_at_the_chosen_positions() -> None:
    vectors, codec = [gaussian(9000, seed=s) for s in range(3)], make_codec("randomk:0.1")
    codec.set_round(5)
    packets = [codec.encode(x) for x in vectors]
    reducer = make_codec(packets[0].codec)  # knows neither the round nor the members
    mean = torch.stack([reducer.decode(p) for p in packets]).mean(0)
    again = reducer.decode(reducer.mean_codec(packets[0]).encode(mean))
    assert torch.equal(again, mean)


def test_seeds_are_the_same_forever() -> None:
    assert mixed("positions", 3, 4096) == mixed("positions", 3, 4096)
    assert mixed(1, 2) != mixed(2, 1)
    assert permutation(7, 8).tolist() == PERMUTATION


PERMUTATION = [1, 5, 7, 0, 4, 6, 3, 2]


def test_bytes_on_the_wire_are_as_documented() -> None:
    x = torch.cat([torch.full((8,), 7.0), torch.full((8,), -14.0)])
    data = bytes(make_codec("int4:8").encode(x).data)
    unit = float(np.frombuffer(data, "<f4", count=1)[0])
    halves = np.frombuffer(data, "<f2", count=2, offset=4)
    assert (halves * unit).tolist() == [1.0, 2.0]
    assert data[8:] == bytes([0xEE] * 4 + [0x00] * 4)
    packet = make_codec("topk:0.125").encode(x)
    assert isinstance(packet, Packet)
    assert bytes(packet.data) == bytes([0x00, 0x03]) + np.array([-14, -14], "<f4").tobytes()
