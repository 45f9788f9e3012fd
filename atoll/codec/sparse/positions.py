"""Positions of a sparse vector's elements, in a number of bytes known in advance.

k ascending positions among n, little endian, whichever is smaller:

  bitmap     ceil(n/8) bytes: bit i tells whether element i is present
  numbers    4*ceil(n/65536) bytes: number of positions in each 65536 elements, uint32;
             then 2*k bytes: the positions in these, uint16

The choice depends only on n and k (a bitmap from a density of 1/16 on), so that the length of a
packet is known in advance.
"""

from __future__ import annotations

import numpy as np

from atoll.codec.quantized.packing import Bytes, Indices
from atoll.errors import WireError

_SPAN = 1 << 16


def _spans(elements: int) -> int:
    return -(-elements // _SPAN)


def _as_bitmap(elements: int, count: int) -> bool:
    return -(-elements // 8) <= 4 * _spans(elements) + 2 * count


def positions_bytes(elements: int, count: int) -> int:
    """Return the bytes of `count` positions among `elements`."""
    return min(-(-elements // 8), 4 * _spans(elements) + 2 * count)


def write_positions(positions: Indices, *, elements: int, out: Bytes) -> None:
    """Write ascending positions into exactly `positions_bytes` bytes."""
    if _as_bitmap(elements, len(positions)):
        marks = np.zeros(elements, dtype=np.bool_)
        marks[positions] = True
        np.copyto(out, np.packbits(marks, bitorder="little"))
        return
    edge = 4 * _spans(elements)
    counts = np.bincount(positions >> 16, minlength=_spans(elements)).astype("<u4")
    np.copyto(out[:edge], counts.view(np.uint8))
    np.copyto(out[edge:], (positions & (_SPAN - 1)).astype("<u2").view(np.uint8))


def read_positions(data: Bytes, *, elements: int, count: int) -> Indices:
    """Return the positions, ascending, shape (count,); raises WireError if they are invalid."""
    if _as_bitmap(elements, count):
        marks = np.unpackbits(data, bitorder="little")
        found = np.flatnonzero(marks)
    else:
        edge = 4 * _spans(elements)
        counts = np.frombuffer(data[:edge].tobytes(), dtype="<u4").astype(np.int64)
        found = np.frombuffer(data[edge:].tobytes(), dtype="<u2").astype(np.int64)
        if int(counts.sum()) != count or int(counts.max(initial=0)) > count:
            raise _wrong(f"spans with {int(counts.sum())} positions", elements, count)
        found += np.repeat(np.arange(len(counts)) * _SPAN, counts)
    ascending = len(found) < 2 or bool((np.diff(found) > 0).all())
    if len(found) != count or not ascending or (count and int(found[-1]) >= elements):
        raise _wrong(f"{len(found)} positions", elements, count)
    return found


def _wrong(given: str, elements: int, count: int) -> WireError:
    return WireError(
        "the positions in a sparse packet are damaged",
        given=given,
        expected=f"{count} ascending positions below {elements}",
    )
