"""Where the numbers of a vector are in its packet, against the packets themselves."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec.layout import LaidOut, Layout, last_bytes
from atoll.codec.registry import make_codec
from atoll.reducer.block_view import Sliceable

CODECS = ("fp32", "bf16", "fp16", "int8:256", "int8:1000", "sigma8")


@pytest.mark.parametrize("codec", CODECS)
@given(elements=st.integers(1, 70_000), parts=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_a_layout_says_where_elements_are(codec: str, elements: int, parts: int, seed: int) -> None:
    coder = make_codec(codec)
    assert isinstance(coder, LaidOut)
    assert isinstance(coder, Sliceable)
    layout = Layout(coder.layout, elements)
    packet = coder.encode(torch.randn(elements, generator=torch.Generator().manual_seed(seed)))
    assert layout.total_bytes == len(packet.data) == coder.nbytes(elements)
    start = elements // (parts * coder.grain) * coder.grain
    cut = b"".join(bytes(memoryview(packet.data)[a:b]) for a, b in layout.spans(start, elements))
    assert cut == bytes(coder.cut(packet, start, elements).data)
    known = random.Random(seed).randint(0, layout.total_bytes)
    done = layout.elements_in(known)
    assert done % coder.grain == 0 or done == elements
    assert all(stop <= known for _, stop in layout.spans(0, done) if done)
    assert layout.elements_in(layout.total_bytes) == elements


@pytest.mark.parametrize(
    "spec", ["int4", "e3m0", "topk:0.1", "topk:0.1|int8", "sign", "randomk:0.1"]
)
def test_codecs_with_one_head_for_all_have_no_layout(spec: str) -> None:
    assert not isinstance(make_codec(spec), LaidOut)
    assert last_bytes(spec, 1e9, piece=1000) == 1e9


@pytest.mark.parametrize(
    ("codec", "last"),
    [("fp32", 1e5), ("feedback(fp16)", 1e5), ("feedback(int8)", 4e5), ("int8:2048", 3e5)],
)
def test_what_waits_for_the_end_is_little_of_a_large_packet(codec: str, last: float) -> None:
    assert last_bytes(codec, 1e7, piece=100_000) == last
    assert last_bytes(codec, 9e4, piece=100_000) == 9e4
