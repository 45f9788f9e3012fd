"""Bytes of exchanges, by hand."""

from __future__ import annotations

import pytest

from atoll.codec import make_codec
from atoll.strategies.base import Traffic
from atoll.strategies.traffic import all_to_all_volume, allgather_volume, times, total, volume


def test_all_to_all_uploads_once_by_relay_and_to_all_direct() -> None:
    found = all_to_all_volume([(100, 3), (10, 1)], [70, 30])
    assert found == Traffic(1, 110, 100, 310, 100)
    assert all_to_all_volume([], []) == Traffic(1, 0, 0, 0, 0)


@pytest.mark.parametrize("peers", [2, 3, 8])
def test_unreduced_packets_come_from_all_others(peers: int) -> None:
    codec = make_codec("feedback(topk:0.01|int8)")
    nbytes = codec.nbytes(10_000)
    expected = Traffic(1, nbytes, nbytes * (peers - 1), nbytes * (peers - 1), nbytes * (peers - 1))
    assert volume(codec, 10_000, peers) == allgather_volume(codec, 10_000, peers) == expected


@pytest.mark.parametrize("spec", ["fp32", "int8", "topk:0.1", "randomk:0.1|int4"])
def test_one_member_alone_sends_nothing(spec: str) -> None:
    assert volume(make_codec(spec), 10_000, 1) == Traffic(1, 0, 0, 0, 0)
    assert allgather_volume(make_codec(spec), 10_000, 1) == Traffic(1, 0, 0, 0, 0)


def test_random_positions_have_a_mean_unless_a_choice_follows() -> None:
    shared = make_codec("randomk:0.1|int8")
    nbytes = shared.nbytes(50_000)
    found = volume(shared, 50_000, 8)
    assert (found.relay_sent_bytes, found.relay_received_bytes) == (nbytes, nbytes)
    chosen = make_codec("randomk:0.1|topk:0.5")
    assert volume(chosen, 50_000, 8).relay_received_bytes == 7 * chosen.nbytes(50_000)


def test_sums_and_multiples() -> None:
    one = Traffic(1, 1, 2, 3, 4)
    assert times(one, 3) == total([one, one, one]) == Traffic(3, 3, 6, 9, 12)
