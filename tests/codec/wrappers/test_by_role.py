"""Matrices in one codec, everything else in another, and packets that say which is which."""

from __future__ import annotations

import pytest
import torch

from atoll.codec import Packet, make_codec
from atoll.errors import WireError

SHAPES = [(30, 20), (20,), (7,), (4, 5, 6), (11,)]
TOTAL = 600 + 27 + 120 + 11


def vector() -> torch.Tensor:
    return torch.randn(TOTAL, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[::-1]])
def test_each_kind_goes_through_its_codec(shapes: list[tuple[int, ...]]) -> None:
    codec, x = make_codec("by_role(sign:8,fp32)"), vector()
    codec.set_shapes(shapes)
    packet = codec.encode(x)
    matrices, others = make_codec("sign:8").nbytes(720), 4 * 38
    runs = 4 if shapes is SHAPES else 5
    assert len(packet.data) == codec.nbytes(TOTAL) == 4 + 4 * runs + matrices + others
    found = make_codec(packet.codec).decode(packet)
    start = 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        same = torch.equal(found[start : start + size], x[start : start + size])
        assert same == (len(shape) == 1)
        start += size
    total = torch.ones(TOTAL)
    make_codec(packet.codec).decode_add(packet, out=total, weight=0.5)
    assert torch.allclose(total, 1 + 0.5 * found)


def test_vector_of_another_length_is_one_matrix() -> None:
    codec = make_codec("by_role(int8,fp32)")
    codec.set_shapes(SHAPES)
    x = torch.randn(100)
    found = codec.decode(codec.encode(x))
    assert torch.equal(found, make_codec("int8").decode(make_codec("int8").encode(x)))


@pytest.mark.parametrize("damage", ["count", "run", "short"])
def test_packet_that_contradicts_itself_is_refused(damage: str) -> None:
    codec = make_codec("by_role(int8,fp32)")
    codec.set_shapes(SHAPES)
    packet = codec.encode(vector())
    data = bytearray(packet.data)
    if damage == "short":
        del data[-1:]
    else:
        data[3 if damage == "count" else 4] ^= 0xFF
    with pytest.raises(WireError, match="wrong length"):
        make_codec(packet.codec).decode(Packet(data, packet.codec, packet.sizes))
