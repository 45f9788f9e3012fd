"""Which driver takes the microbatches that are free."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.swarm.leases import FIRST_LEASE_S, SILENT_S, Leases
from atoll.wire.swarm import Holder, SwarmLease

FAST, SLOW = Holder("fast", 1), Holder("slow", 2)
ROW_S = {FAST: 0.1, SLOW: 0.3}


def leases_of(fast: int, slow: int) -> Leases:
    """Return leases of two drivers with so many under way."""
    leases = Leases()
    for number in range(fast + slow):
        driver = FAST if number < fast else SLOW
        leases.start(SwarmLease(0, number, number + 1, [0]), driver, 0.0)
    for driver in ROW_S:
        leases.part(driver, 0, ROW_S, 0.0)
    return leases


def test_many_free_microbatches_go_by_speed() -> None:
    leases = leases_of(0, 0)
    assert leases.part(FAST, 40, ROW_S, 0.0) == 30
    assert leases.part(SLOW, 40, ROW_S, 0.0) == 10


def test_the_last_free_microbatches_go_to_the_fast_driver() -> None:
    leases = leases_of(0, 0)
    assert leases.part(SLOW, 2, ROW_S, 0.0) == 0
    assert leases.part(FAST, 2, ROW_S, 0.0) == 2


def test_what_is_under_way_counts() -> None:
    leases = leases_of(6, 0)
    assert leases.part(SLOW, 2, ROW_S, 0.0) == 2
    assert leases.part(FAST, 2, ROW_S, 0.0) == 0


def test_nothing_is_kept_for_a_silent_driver() -> None:
    leases = leases_of(0, 0)
    assert leases.part(SLOW, 1, ROW_S, SILENT_S / 2) == 0
    assert leases.part(SLOW, 1, ROW_S, SILENT_S) == 1
    assert leases.part(FAST, 1, ROW_S, SILENT_S) == 1  # it asks again


def test_drivers_of_unknown_speed_share_evenly() -> None:
    leases = leases_of(0, 0)
    unknown = dict.fromkeys(ROW_S, 0.0)
    assert [leases.part(driver, 8, unknown, 0.0) for driver in ROW_S] == [4, 4]


def test_what_a_fast_driver_holds_too_long_goes_to_a_slow_one() -> None:
    leases = leases_of(1, 0)
    late = FIRST_LEASE_S + 1
    assert leases.free(FAST, {(0, 0): [0, 1]}, ROW_S, late) == []
    assert leases.free(SLOW, {(0, 0): [0, 1]}, ROW_S, late) == [((0, 0), [0, 1])]
    leases.start(SwarmLease(0, 0, 9, [0, 1]), SLOW, late)
    assert leases.free(FAST, {(0, 0): [0, 1]}, ROW_S, 2 * late) == []


class Counted(dict[tuple[int, int], list[int]]):
    """Counts how often its keys are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.passes += 1
        return super().__iter__()


def test_a_driver_that_asks_costs_one_pass() -> None:
    lacking = Counted({(step, index): [0] for step in (3, 4) for index in range(50)})
    found = leases_of(0, 0).free(FAST, lacking, {FAST: 0.1}, 0.0)
    assert [place for place, _ in found] == list(lacking.keys())
    assert lacking.passes <= 1
