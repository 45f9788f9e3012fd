"""Numbers that were had: each once, in any order, in bounded memory."""

from __future__ import annotations

import random

from atoll.rl.channel.actor_registry import MOST_GAPS, SeenSequences


def test_each_number_is_new_once_in_any_order() -> None:
    numbers = [*range(1, 200)] * 3
    random.Random(1).shuffle(numbers)
    seen = SeenSequences()
    assert sorted(n for n in numbers if seen.add(n)) == [*range(1, 200)]
    assert (seen.highest, seen.missing) == (199, 0)


def test_what_made_room_is_missing_until_it_comes() -> None:
    seen = SeenSequences()
    for number in (1, 2, 5, 8):
        seen.add(number)
    assert (seen.highest, seen.missing) == (8, 4)
    assert seen.add(3)
    assert not seen.add(3)
    assert seen.missing == 3


def test_a_saved_one_goes_on_where_it_was() -> None:
    seen = SeenSequences()
    for number in (1, 2, 5):
        seen.add(number)
    again = SeenSequences.from_list(seen.to_list())
    assert [n for n in range(1, 7) if again.add(n)] == [3, 4, 6]


def test_gaps_do_not_grow_without_bound() -> None:
    seen = SeenSequences()
    for number in range(1, 40 * MOST_GAPS, 2):
        assert seen.add(number)
    assert len(seen.to_list()[1]) <= MOST_GAPS
    assert not seen.add(2)  # it never came, and counts as received
