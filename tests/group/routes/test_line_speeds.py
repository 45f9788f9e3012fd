"""Lines between members, measured in pairs."""

from __future__ import annotations

import pytest

from atoll.group.routes.line_speeds import measure_lines, partners
from tests.group.meeting_place import places


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_all_meet_in_pairs_without_waiting_for_a_third(n: int) -> None:
    """Partners of equal turns are each other's: only then does no member wait for the next pair."""
    met = [list(partners(rank, n)) for rank in range(n)]
    for rank in range(n):
        assert sorted(met[rank]) == [other for other in range(n) if other != rank]
    if n % 2 == 0:  # with an odd number one is left over in every turn
        for turn in range(n - 1):
            assert all(met[met[rank][turn]][turn] == rank for rank in range(n))


def test_every_member_learns_the_lines_from_all_others() -> None:
    with places() as make:
        found = make(5).together(measure_lines)
    for rank, lines in enumerate(found):
        assert sorted(lines) == [f"w{other}" for other in range(5) if other != rank]
        assert all(trip_s > 0 and bytes_per_s > 0 for trip_s, bytes_per_s in lines.values())
