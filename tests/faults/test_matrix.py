"""Every fault in every phase of a round, a recovery and a checkpoint, on every role and route."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.simulation.faults import FAULTS, PHASES, ROLES, ROUTES, matrix
from tests.faults.simulation.schedule import run_cell
from tests.tiers import sampled

CELLS_OF_A_SEED = 500
SHARES = 7


def test_matrix_is_the_product_without_impossible_pairs() -> None:
    cells = matrix()
    assert len(set(cells)) == len(cells) > 800
    assert {cell.phase for cell in cells} == set(PHASES)
    assert {cell.fault for cell in cells} == set(FAULTS)
    assert {cell.role for cell in cells} == set(ROLES)
    assert {cell.route for cell in cells} == set(ROUTES)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "share",
    sampled(
        range(SHARES),
        lambda share: share == 0,
        "tests/faults/test_matrix.py::test_no_promise_is_broken_wherever_it_strikes",
    ),
)
def test_no_promise_is_broken_wherever_it_strikes(share: int, fault: str, schedules: int) -> None:
    """Each share takes every seventh cell of a fault; together they take all of them."""
    seeds = range(1 + schedules // CELLS_OF_A_SEED)
    missed: Counter[str] = Counter()
    for cell in [cell for cell in matrix() if cell.fault == fault][share::SHARES]:
        for seed in seeds:
            outcome = run_cell(cell, seed)
            assert not outcome.broken, outcome.explain()
            missed[str(cell)] += not outcome.struck
    never = [cell for cell, count in missed.items() if count == len(seeds)]
    assert not never, f"these faults never happened: {never}"
