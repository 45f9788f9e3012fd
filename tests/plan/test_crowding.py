"""How long passes take beside those of other ranks."""

from __future__ import annotations

import pytest

from atoll.plan.crowding import seconds_beside


@pytest.mark.parametrize("later_s", [0.5, 2.0])
def test_a_measured_rank_goes_on_without_counting(later_s: float) -> None:
    """What is computed for the others' sake, at whatever speed, changes nothing."""
    now, passes = 0.0, 0

    def once() -> None:
        nonlocal now, passes
        now, passes = now + (1.0 if passes < 3 else later_s), passes + 1

    assert seconds_beside(once, span_s=2.5, clock=lambda: now) == 1.0
    assert passes == {0.5: 7, 2.0: 4}[later_s], "for two passes of the usual length"
