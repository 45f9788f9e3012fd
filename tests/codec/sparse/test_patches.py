"""A patch makes exactly the next version, whatever the bits; damage and gaps are noticed."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.sparse.patches import (
    about_patch,
    apply_patch,
    bits_of,
    digest_of,
    make_patch,
)
from atoll.errors import WireError
from tests.tiers import examples

KINDS = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool]


def random_bits(kind: torch.dtype, count: int, seed: int) -> Tensor:
    """Return numbers of every bit pattern: NaN with payloads, infinities, both zeros, subnormal."""
    if kind == torch.bool:
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 2, count) > 0)
    size = torch.empty(0, dtype=kind).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8)
    return torch.from_numpy(raw).view(kind) if count else torch.empty(0, dtype=kind)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(bits_of(one[name]), bits_of(other[name])) for name in one
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15), deadline=None)
@given(count=st.integers(1, 300), changes=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_every_bit_pattern_arrives(kind: torch.dtype, count: int, changes: int, seed: int) -> None:
    old = {"a": random_bits(kind, count, seed), "b": random_bits(kind, 3, seed + 1)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    where = np.random.default_rng(seed).permutation(count)[:changes]
    new["a"][where] = random_bits(kind, len(where), seed + 2)
    patch = make_patch(old, new, version=7)
    kept = {name: tensor.clone() for name, tensor in old.items()}
    assert same(apply_patch(old, patch), new)
    assert same(old, kept)
    about = about_patch(patch)
    assert (about.version, about.base, about.digest) == (7, digest_of(old), digest_of(new))
    differing = sum(int((bits_of(old[n]) != bits_of(new[n])).sum()) for n in old)
    assert about.changed == differing


def test_the_sign_of_zero_and_the_payload_of_nan_are_changes() -> None:
    old = torch.tensor([0x0000, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    patch = make_patch({"w": old}, {"w": new}, version=1)
    assert about_patch(patch).changed == 2
    assert same(apply_patch({"w": old}, patch), {"w": new})


def test_a_chain_of_patches_equals_the_whole() -> None:
    draws = torch.Generator().manual_seed(3)
    master = torch.randn(5000, generator=draws) * 0.05
    start = have = {"w": master.to(torch.bfloat16)}
    for version in range(1, 12):
        master = master + torch.randn(5000, generator=draws) * 1e-5
        new = {"w": master.to(torch.bfloat16)}
        have = apply_patch(have, make_patch(have, new, version=version))
    assert digest_of(have) == digest_of({"w": master.to(torch.bfloat16)})
    assert digest_of(have) != digest_of(start)


def test_few_changes_take_few_bytes() -> None:
    draws = torch.Generator().manual_seed(3)
    count = 200_000
    old = (torch.randn(count, generator=draws) * 0.05).to(torch.bfloat16)
    bits = old.view(torch.int16).clone()
    where = torch.randperm(count, generator=draws)[: count // 200]
    bits[where] += torch.where(torch.rand(len(where), generator=draws) < 0.5, -1, 1).to(torch.int16)
    patch = make_patch({"w": old}, {"w": bits.view(torch.bfloat16)}, version=1)
    assert len(patch) < len(where) * 1.6 + 400  # bytes per change: 9 bits of place, 1 of sign


def test_another_version_is_refused() -> None:
    one, two = {"w": torch.zeros(9)}, {"w": torch.ones(9)}
    three = {"w": torch.full((9,), 2.0)}
    patch = make_patch(two, three, version=2)
    with pytest.raises(WireError, match="another version"):
        apply_patch(one, patch)
    lying = make_patch(two, three, version=2, digest=digest_of(one))
    with pytest.raises(WireError, match="not those of the sender"):
        apply_patch(two, lying)


def test_other_tensors_are_refused() -> None:
    with pytest.raises(WireError, match="different tensors"):
        make_patch({"a": torch.ones(2)}, {"b": torch.ones(2)}, version=1)
    with pytest.raises(WireError, match="another shape"):
        make_patch({"a": torch.ones(2)}, {"a": torch.ones(3)}, version=1)
    patch = make_patch({"a": torch.zeros(2)}, {"a": torch.ones(2)}, version=1)
    with pytest.raises(WireError, match="unknown tensor"):
        apply_patch({"b": torch.zeros(2)}, patch, base=digest_of({"a": torch.zeros(2)}))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_damage_is_an_error_and_nothing_else(data: st.DataObject) -> None:
    old = {"w": torch.zeros(500, dtype=torch.bfloat16)}
    new = {"w": random_bits(torch.bfloat16, 500, 4)}
    patch = bytearray(make_patch(old, new, version=1))
    at = data.draw(st.integers(0, len(patch) - 1))
    cut = data.draw(st.booleans())
    damaged = bytes(patch[:at]) if cut else bytes(patch)
    if not cut:
        patch[at] ^= data.draw(st.integers(1, 255))
        damaged = bytes(patch)
    try:
        found = apply_patch(old, damaged)
    except WireError:
        return
    assert same(found, new)  # the version's number, for example


def headed(head: bytes, *parts: bytes) -> bytes:
    """Return a patch with a head of somebody's own."""
    packed = zlib.compress(head)
    return b"".join([b"ATP1", len(packed).to_bytes(4, "little"), packed, *parts])


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"version":1,"base":"","digest":"","tensors":' + b"[" * 5_000,
        b'{"version":"one","base":"","digest":"","tensors":[]}',
        b'{"version":1,"base":"","digest":"","tensors":[{"name":"w","count":-1,"bytes":0}]}',
        b'{"version":1,"base":"","digest":"","tensors":[{"name":"w","count":1e999,"bytes":0}]}',
        b'{"version":1,"base":"","digest":"","tensors":{}}',
        b" " * (1 << 25),
    ],
    ids=range(7),
)
def test_heads_of_somebodys_own_are_wire_errors(head: bytes) -> None:
    with pytest.raises(WireError, match="damaged"):
        about_patch(headed(head))
    with pytest.raises(WireError, match="damaged"):
        apply_patch({"w": torch.zeros(9)}, headed(head))


def test_patch_takes_no_more_memory_than_its_tensor() -> None:
    """A megabyte of zlib is a gigabyte of zeros: what the sender counts decides nothing."""
    old = {"w": torch.zeros(9)}
    body = zlib.compress(bytes(1 << 26), 9)
    row = {"name": "w", "count": 1 << 40, "bytes": len(body)}
    told = {"version": 1, "base": digest_of(old), "digest": "", "tensors": [row]}
    tracemalloc.start()
    with pytest.raises(WireError, match="more numbers than there are"):
        apply_patch(old, headed(json.dumps(told).encode(), body))
    row["count"] = 9
    with pytest.raises(WireError, match="damaged"):
        apply_patch(old, headed(json.dumps(told).encode(), body))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 22
