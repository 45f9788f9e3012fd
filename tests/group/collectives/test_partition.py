from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.group.collectives.topology import partition


@given(st.integers(0, 10**7), st.integers(1, 64), st.sampled_from([1, 2, 256, 1000, 1024]))
def test_chunks_are_near_equal_aligned_and_complete(elements: int, parts: int, block: int) -> None:
    sizes = partition(elements, parts, block=block)
    assert len(sizes) == parts
    assert sum(sizes) == elements
    assert all(size >= 0 for size in sizes)
    filled = [size for size in sizes if size]
    assert all(size % block == 0 for size in filled[:-1])
    assert max(sizes) - min(sizes) <= 2 * block
