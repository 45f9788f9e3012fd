"""What is kept: the newest, every nth and the best; never nothing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.retention import Keep

SCORES = st.dictionaries(
    st.integers(0, 60), st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=30
)
RULES = st.builds(
    Keep, newest=st.integers(-1, 5), every=st.integers(-1, 9), best=st.integers(-1, 4)
)


def test_newest_every_nth_and_best_together() -> None:
    complete = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.0, 6: 9.0, 7: math.nan}
    assert Keep(newest=1).rounds(complete) == {7}
    assert Keep(newest=2).rounds(complete) == {6, 7}
    assert Keep(newest=1, every=3).rounds(complete) == {3, 6, 7}
    assert Keep(newest=1, best=1).rounds(complete) == {5, 7}  # of equal ones the later
    assert Keep(newest=1, best=3).rounds(complete) == {2, 3, 5, 7}
    assert Keep().rounds({}) == set()


@given(SCORES, RULES)
def test_newest_is_always_kept_and_nothing_is_invented(
    complete: dict[int, float | None], rule: Keep
) -> None:
    kept = rule.rounds(complete)
    assert kept <= set(complete)
    if complete:
        assert max(complete) in kept
    assert len(kept) >= min(len(complete), max(1, rule.newest))


@given(SCORES, RULES)
def test_what_was_kept_is_kept_again(complete: dict[int, float | None], rule: Keep) -> None:
    kept = rule.rounds(complete)
    assert rule.rounds({round_: complete[round_] for round_ in kept}) == kept


@given(SCORES, st.integers(1, 4))
def test_no_dropped_checkpoint_is_better_than_a_kept_one(
    complete: dict[int, float | None], best: int
) -> None:
    kept = Keep(newest=1, best=best).rounds(complete) - {max(complete, default=-1)}
    dropped = set(complete) - kept - {max(complete, default=-1)}
    for good in kept:
        for bad in dropped:
            value, other = complete[good], complete[bad]
            if other is not None and math.isfinite(other):
                assert value is not None
                assert value <= other
