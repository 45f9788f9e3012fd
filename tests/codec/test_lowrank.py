"""Products of thin matrices: exact up to their rank, better over the rounds, same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codec import Packet, make_codec
from atoll.codec.base import Codec
from atoll.errors import WireError

SHAPES = [(60, 40), (40,), (8, 5, 12), (3, 2)]
SIZES = [2400, 40, 480, 6]
TOTAL = sum(SIZES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fitted(spec: str) -> Codec:
    codec = make_codec(spec)
    codec.set_shapes(SHAPES)
    return codec


def of_rank(rank: int, *, seed: int = 0) -> Tensor:
    matrix = gaussian(60, rank, seed=seed) @ gaussian(rank, 40, seed=seed + 1)
    rest = gaussian(TOTAL - 2400, seed=seed + 2)
    rest[40 : 40 + 480] = (gaussian(8, 1, seed=seed + 3) @ gaussian(1, 60, seed=seed)).view(-1)
    return torch.cat([matrix.view(-1), rest])


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e25])
def test_matrix_of_the_rank_or_less_comes_back(rank: int, scale: float) -> None:
    x = of_rank(rank) * scale
    codec = fitted("lowrank:4")
    found = make_codec("lowrank:4").decode(codec.encode(x))
    assert float((found - x).abs().max() / x.abs().max()) < 1e-5
    assert torch.equal(found[2400:2440], x[2400:2440])  # one dimension: as it is
    assert torch.equal(found[-6:], x[-6:])  # would not get smaller


def test_packet_weighs_what_its_matrices_weigh() -> None:
    codec = fitted("lowrank:2")
    expected = 4 + 8 * 4 + 4 * (2 * (60 + 40) + 40 + 2 * (8 + 60) + 6)
    assert codec.nbytes(TOTAL) == expected == len(codec.encode(of_rank(3)).data)
    assert codec.nbytes(TOTAL + 1) == 4 + 8 + 4 * (TOTAL + 1)
    assert make_codec("lowrank:2").nbytes(TOTAL) == 4 + 8 + 4 * TOTAL


def test_warm_start_turns_towards_the_directions_that_matter() -> None:
    strong = torch.diag(torch.tensor([10.0, 8, 6, 4] + [1.0] * 36))
    matrix = gaussian(60, 40, seed=5)
    matrix = torch.linalg.qr(matrix)[0] @ strong @ torch.linalg.qr(gaussian(40, 40))[0]
    x = torch.cat([matrix.view(-1), torch.zeros(TOTAL - 2400)])
    best = float(torch.linalg.svdvals(matrix)[4:].norm())
    codec, errors = fitted("lowrank:4"), []
    for _ in range(8):
        errors.append(float((codec.decode(codec.encode(x)) - x).norm()))
        codec.finish(committed=True)
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.01 * best


def test_aborted_round_keeps_the_state_that_is_saved() -> None:
    codec, calm = fitted("lowrank:2"), fitted("lowrank:2")
    for one in (codec, calm):
        one.encode(of_rank(5, seed=1))
        one.finish(committed=True)
    codec.encode(of_rank(5, seed=2))
    codec.finish(committed=False)
    loaded = fitted("lowrank:2")
    loaded.load_state_dict(codec.state_dict())
    packets = [bytes(one.encode(of_rank(5, seed=3)).data) for one in (codec, calm, loaded)]
    assert packets[0] == packets[1] == packets[2]


def test_a_direction_that_died_out_comes_back() -> None:
    codec = fitted("lowrank:2")
    for _ in range(3):
        codec.encode(torch.zeros(TOTAL))
        codec.finish(committed=True)
        codec.encode(of_rank(1))
        codec.finish(committed=True)
    x = of_rank(2, seed=9)
    assert float((codec.decode(codec.encode(x)) - x).norm() / x.norm()) < 1e-4


def test_feedback_makes_up_for_what_a_low_rank_leaves_out() -> None:
    codec, x = fitted("feedback(lowrank:2)"), gaussian(TOTAL)
    total = torch.zeros(TOTAL)
    for _ in range(60):
        codec.decode_add(codec.encode(x, key="k"), out=total)
        codec.finish(committed=True)
    assert float((total / 60 - x).norm() / x.norm()) < 0.25
    names = set(codec.state_dict())
    assert {"k", "inner.k/0", "inner.k/2"} == names
    other = fitted("feedback(lowrank:2)")
    other.load_state_dict(codec.state_dict())
    again, expected = (bytes(c.encode(x, key="k").data) for c in (other, codec))
    assert again == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_value_that_is_not_finite_breaks_its_matrix_and_no_other(bad: float) -> None:
    x = of_rank(2)
    x[7] = bad
    codec = fitted("lowrank:2")
    found = codec.decode(codec.encode(x))
    assert found[:2400].isnan().all()
    assert torch.isfinite(found[2400:]).all()
    codec.finish(committed=True)
    assert "x/0" not in codec.state_dict()


def test_wide_and_flat_matrices_decode() -> None:
    codec = make_codec("lowrank:5")
    codec.set_shapes([(3, 900), (900, 7)])
    x = torch.cat([gaussian(2700), (gaussian(900, 2) @ gaussian(2, 7)).view(-1)])
    found = make_codec("lowrank:5").decode(codec.encode(x))
    assert float((found - x).norm() / x.norm()) < 1e-5


@pytest.mark.parametrize("damage", ["count", "rows", "short"])
def test_packet_that_contradicts_itself_is_refused(damage: str) -> None:
    packet = fitted("lowrank:2").encode(of_rank(2))
    data = bytearray(packet.data)
    if damage == "count":
        data[3] = 0xFF
    elif damage == "rows":
        data[4] += 1
    else:
        del data[-4:]
    with pytest.raises(WireError, match="wrong length"):
        make_codec("lowrank:2").decode(Packet(bytes(data), packet.codec, packet.sizes))


def test_a_packet_with_a_matrix_without_columns_is_empty() -> None:
    head = np.array([1, 5, 0], dtype="<u4").tobytes()
    packet = Packet(head + bytes(4 * 2 * 5), "lowrank:2", (0,))
    assert make_codec("lowrank:2").decode(packet).numel() == 0


def test_a_small_packet_that_names_terabytes_is_refused() -> None:
    head = np.array([1, 2**20, 2**20], dtype="<u4").tobytes()
    packet = Packet(head + bytes(2 * 4 * 2 * 2**20), "lowrank:2", (2**40,))
    with pytest.raises(WireError, match="other matrices"):
        fitted("lowrank:2").decode(packet)


def test_values_near_the_largest_float_come_back() -> None:
    x = torch.zeros(TOTAL)
    x[41] = 3e38
    found = make_codec("lowrank:2").decode(fitted("lowrank:2").encode(x))
    assert float((found - x).abs().max() / 3e38) < 1e-5
