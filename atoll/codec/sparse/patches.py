"""Lossless patches from one version of a model's weights to the next.

PULSE (https://arxiv.org/abs/2602.03839): at the learning rates of reinforcement learning few bf16
weights change in a step, because a step is smaller than half of the distance between neighbouring
numbers. A patch has the positions of those that do, and what they become. It applies to one version
only, and both sides compare the SHA-256 of the whole new version, so chains are exact.

Differs from the paper:
  * weights are compared and written as bit patterns: -0.0 and the payloads of NaN count;
  * a change is written as the difference of the patterns as integers modulo 2^bits, which is as
    exact as the value, and compresses better: most weights move to a neighbouring number;
  * positions are counted among the weights of the same exponent, which the receiver knows, too: the
    smaller a weight, the likelier it changes. That takes a third off them.

    part 1   JSON: version, base, digest, and of every changed tensor name, changes, bytes
    part 2   of each, compressed with zlib: changes by exponent (256 numbers of 4 bytes); positions
             of each exponent's (`positions.py`); the differences (zigzag). Numbers are little
             endian, the lowest bytes of all first
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.codec.sparse.positions import positions_bytes, read_positions, write_positions
from atoll.digest import Digest
from atoll.errors import WireError

_HEAD = struct.Struct("<4sI")
_MAGIC = b"ATP1"
_LEVEL = 6
_BITS: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED: dict[int, type[Any]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_MOST_HEADER = 1 << 24
"""Bytes of part 1, about a hundred per tensor."""
_CLASSES = 256
_EXPONENT_AT = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
"""Lowest bit of the exponent; other types have one class."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Row(msgspec.Struct, frozen=True):
    name: str
    count: _Count
    bytes: _Count


class _Head(msgspec.Struct, frozen=True):
    version: _Count
    base: str
    digest: str
    tensors: list[_Row]


Weights = Mapping[str, Tensor]
Bits = NDArray[Any]


@dataclass(frozen=True, slots=True)
class About:
    """Header of a patch."""

    version: int
    base: str
    """Digest of the version that it applies to."""
    digest: str
    """Digest of the version that it makes."""
    changed: int
    """Weights that change."""


def digest_of(weights: Weights) -> str:
    """Return the digest of all names, types, shapes and bit patterns, in order of the names."""
    found = Digest()
    for name in sorted(weights):
        tensor = weights[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(bits_of(tensor).data)
    return found.hexdigest()


def bits_of(tensor: Tensor) -> Bits:
    """Return a tensor's bit patterns as unsigned integers, 1-D; a view where that is possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    size = flat.element_size()
    if size not in _BITS:
        raise WireError(
            "numbers of this type have no patch", given=str(tensor.dtype),
            expected="numbers of 1, 2, 4 or 8 bytes",
        )  # fmt: skip
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return flat.view(kind).numpy().view(_BITS[size])


def make_patch(
    old: Weights, new: Weights, *, version: int, base: str = "", digest: str = ""
) -> bytes:
    """Return the patch from `old` to `new`, which have the same names, shapes and types.

    Args:
        old: What receivers have.
        new: What they are to have.
        version: Its number, for people and for order.
        base: Digest of `old`, if it is known.
        digest: Digest of `new`, if it is known.

    Raises:
        WireError: the tensors differ in name, shape or type.
    """
    _check_same(old, new)
    rows: list[_Row] = []
    parts: list[bytes] = []
    for name in sorted(new):
        before, after = bits_of(old[name]), bits_of(new[name])
        count = int(np.count_nonzero(before != after))
        if not count:
            continue
        body = zlib.compress(_changes(before, after, new[name].dtype), _LEVEL)
        rows.append(_Row(name, count, len(body)))
        parts.append(body)
    head = _Head(version, base or digest_of(old), digest or digest_of(new), rows)
    packed = zlib.compress(msgspec.json.encode(head), _LEVEL)
    return b"".join([_HEAD.pack(_MAGIC, len(packed)), packed, *parts])


def about_patch(patch: bytes) -> About:
    """Return the header of a patch; raises WireError if it is damaged."""
    head, _ = _read_head(patch)
    return About(head.version, head.base, head.digest, sum(row.count for row in head.tensors))


@torch.no_grad()
def apply_patch(weights: dict[str, Tensor], patch: bytes, *, base: str = "") -> dict[str, Tensor]:
    """Return the next version; `weights` stay as they are, and tensors that do not change are kept.

    Args:
        weights: The version that the patch was made from.
        patch: Of :func:`make_patch`.
        base: Digest of `weights`, if it is known.

    Raises:
        WireError: the patch is damaged, was made from another version, or the result is not the
            one that its sender has.
    """
    head, at = _read_head(patch)
    have = base or digest_of(weights)
    if head.base != have:
        raise WireError(
            "this patch belongs to another version of the weights",
            given=f"version {head.version} from {head.base[:12]}",
            expected=f"one from {have[:12]}", remedy="take a whole version first",
        )  # fmt: skip
    found = dict(weights)
    for row in head.tensors:
        tensor = weights.get(row.name)
        if tensor is None:
            raise WireError("a patch names an unknown tensor", given=row.name[:200])
        if row.count > tensor.numel():
            raise WireError(
                "a patch changes more numbers than there are", given=f"{row.name}: {row.count}",
                expected=f"at most {tensor.numel()}",
            )  # fmt: skip
        found[row.name] = _patched(tensor, patch[at : at + row.bytes], row.count)
        at += row.bytes
    made = digest_of(found)
    if made != head.digest:
        raise WireError(
            "the patched weights are not those of the sender", given=made[:12],
            expected=head.digest[:12], remedy="take a whole version",
        )  # fmt: skip
    return found


def _changes(before: Bits, after: Bits, dtype: torch.dtype) -> bytes:
    """Return part 2 of one tensor, not compressed."""
    order, sizes = _by_exponent(before, dtype)
    changed = (before != after)[order]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    found = [np.flatnonzero(changed[start:end]) for start, end in zip(starts, ends, strict=True)]
    counts = np.array([len(one) for one in found], dtype="<u4")
    pieces = [_planes(counts)]
    for places, size in zip(found, sizes, strict=True):
        out = np.empty(positions_bytes(int(size), len(places)), dtype=np.uint8)
        if len(places):
            write_positions(places, elements=int(size), out=out)
        pieces.append(out.tobytes())
    where = order[np.flatnonzero(changed)]
    moved = (after[where] - before[where]).view(_SIGNED[after.itemsize])
    zigzag = ((moved << 1) ^ (moved >> (8 * moved.itemsize - 1))).view(after.dtype)
    return b"".join([*pieces, _planes(zigzag)])


def _patched(tensor: Tensor, body: bytes, count: int) -> Tensor:
    """Return a copy of a tensor with its changes."""
    bits = bits_of(tensor).copy()
    order, sizes = _by_exponent(bits, tensor.dtype)
    data = _inflated(body, most=4 * _CLASSES + len(bits) // 8 + _CLASSES + count * bits.itemsize)
    counts = _joined(data[: 4 * _CLASSES], np.uint32).astype(np.int64)
    edges = [positions_bytes(int(n), int(k)) for n, k in zip(sizes, counts, strict=True)]
    at = 4 * _CLASSES
    wanted = at + sum(edges) + count * bits.itemsize
    if counts.sum() != count or (counts > sizes).any() or len(data) != wanted:
        raise WireError("a patch is damaged", given=f"{len(data)} bytes", expected=f"{wanted}")
    places, start = [], 0
    for size, number, edge in zip(sizes.tolist(), counts.tolist(), edges, strict=True):
        if number:
            inside = read_positions(data[at : at + edge], elements=size, count=number)
            places.append(inside + start)
        at, start = at + edge, start + size
    where = order[np.concatenate(places)] if places else np.empty(0, dtype=np.int64)
    zigzag = _joined(data[at:], bits.dtype.type)
    one = bits.dtype.type(1)
    bits[where] += (zigzag >> one) ^ (~(zigzag & one) + one)
    signed = torch.from_numpy(bits.view(_SIGNED[bits.itemsize] if bits.itemsize > 1 else np.uint8))
    return signed.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)


def _by_exponent(bits: Bits, dtype: torch.dtype) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of a tensor's numbers by their exponent, and how many have each."""
    if dtype not in _EXPONENT_AT:
        sizes = np.zeros(_CLASSES, dtype=np.int64)
        sizes[0] = len(bits)
        return np.arange(len(bits)), sizes
    kinds = ((bits >> bits.dtype.type(_EXPONENT_AT[dtype])) & bits.dtype.type(255)).astype(np.uint8)
    return np.argsort(kinds, kind="stable"), np.bincount(kinds, minlength=_CLASSES)


def _planes(numbers: Bits) -> bytes:
    """Return the lowest bytes of all numbers, then the next ones, and so on."""
    if not len(numbers):
        return b""
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    planes = little.view(np.uint8).reshape(len(numbers), -1).T
    return np.ascontiguousarray(planes).tobytes()


def _joined(data: NDArray[np.uint8], kind: type[Any]) -> Bits:
    """Return the numbers of :func:`_planes`."""
    size = np.dtype(kind).itemsize
    planes = np.ascontiguousarray(data.reshape(size, -1).T)
    return planes.reshape(-1).view(np.dtype(kind).newbyteorder("<")).astype(kind)


def _inflated(body: bytes, *, most: int) -> NDArray[np.uint8]:
    """Decompress a tensor's part; WireError above `most` bytes, which bounds the memory."""
    try:
        raw = zlib.decompressobj().decompress(body, most + 1)
    except zlib.error as error:
        raise WireError("a patch is damaged", given=str(error)) from error
    if not 4 * _CLASSES <= len(raw) <= most:
        raise WireError("a patch is damaged", given=f"{len(raw)} bytes", expected=f"up to {most}")
    return np.frombuffer(raw, dtype=np.uint8)


def _read_head(patch: bytes) -> tuple[_Head, int]:
    """Return the head of a patch, and where its tensors begin."""
    try:
        magic, length = _HEAD.unpack_from(patch)
        end = _HEAD.size + length
        if magic != _MAGIC or end > len(patch):
            raise ValueError("no patch")
        reading = zlib.decompressobj()
        text = reading.decompress(patch[_HEAD.size : end], _MOST_HEADER)
        head = msgspec.json.decode(text, type=_Head)
        if sum(row.bytes for row in head.tensors) != len(patch) - end:
            raise ValueError("its length is wrong")
    except (struct.error, zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("a patch of weights is damaged", given=str(error)[:200]) from error
    return head, end


def _check_same(old: Weights, new: Weights) -> None:
    if old.keys() != new.keys():
        names = sorted(old.keys() ^ new.keys())
        raise WireError("two versions have different tensors", given=", ".join(names[:3]))
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise WireError(
                "a tensor has another shape or type in the next version",
                given=f"{name}: {tuple(tensor.shape)} {tensor.dtype}",
                expected=f"{tuple(old[name].shape)} {old[name].dtype}",
            )  # fmt: skip
