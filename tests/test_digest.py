"""The digest that members compare."""

import numpy as np
import pytest

from atoll.digest import DIGEST_BYTES, Digest


def test_digests_are_those_of_blake3() -> None:
    # The first bytes of the published digest of an empty input.
    assert Digest().hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc949"
    assert len(Digest(b"abc").digest()) == DIGEST_BYTES


@pytest.mark.parametrize("cut", [0, 1, 4096, 12_000])
def test_where_bytes_are_cut_does_not_matter(cut: int) -> None:
    data = np.random.default_rng(0).standard_normal(1500).tobytes()
    pieces = Digest(data[:cut])
    pieces.update(data[cut:])
    assert pieces.digest() == Digest(data).digest()


def test_arrays_count_by_their_bytes() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert Digest(values.data).digest() == Digest(values.tobytes()).digest()
    assert Digest(np.zeros((0, 3)).data).digest() == Digest().digest()
