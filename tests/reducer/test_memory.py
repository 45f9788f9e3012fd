"""Memory of the reducer: one member's limit, the job's, and what the heartbeats say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from atoll.net.sync_link import SyncLink
from atoll.reducer.memory import JOB as JOB_LIMIT
from atoll.reducer.memory import MEMBER
from atoll.reducer.server import Reducer
from tests.reducer.test_bad_input import BAD, ELEMENTS, HEALTHY, JOB, Bench, plan_of

SIZE = 4 * ELEMENTS


class Limited(Bench):
    """A reducer with limits."""

    def __init__(self, **limits: int) -> None:
        super().__init__(plan_of())
        self.close()
        self.limits = limits
        self.reducer = Reducer(cast(SyncLink, self.endpoint), job=JOB, limits=lambda: self.limits)
        self.reducer._handle(self.plan)


@pytest.fixture
def benches() -> Iterator[list[Limited]]:
    made: list[Limited] = []
    yield made
    for bench in made:
        bench.close()


def vector(value: float, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.full((elements,), value)


def test_a_member_that_sends_too_much_is_refused_alone(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: SIZE, JOB_LIMIT: 100 * SIZE})
    benches.append(bench)
    bench.contribute(BAD, vector(1.0, ELEMENTS + 1))
    (said,) = bench.refused(BAD)
    for part in (f"of {BAD}", f"{SIZE + 4} more", f"at most {SIZE} bytes", MEMBER):
        assert part in said
    for member in HEALTHY:
        bench.contribute(member, vector(2.0))
    found = bench.result(HEALTHY[0])
    assert found is not None
    assert torch.equal(found[0], vector(2.0))
    figures = bench.reducer.figures()
    assert figures[f"refused/{BAD}"] == 1
    assert figures["refused"] == 0
    assert figures[f"held_bytes/{HEALTHY[0]}"] == SIZE


def test_all_members_together_keep_to_the_jobs_limit(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: 100 * SIZE, JOB_LIMIT: 2 * SIZE})
    benches.append(bench)
    for member in (*HEALTHY, BAD):
        bench.contribute(member, vector(1.0))
    refused = [name for name in (*HEALTHY, BAD) if bench.refused(name)]
    assert refused == [*HEALTHY, BAD][2:]
    assert "of this job's members" in bench.refused(BAD)[0]
    assert bench.reducer.figures()["held_bytes"] <= 2 * SIZE


def test_zero_and_absent_mean_no_limit(benches: list[Limited]) -> None:
    for limits in ({}, {MEMBER: 0, JOB_LIMIT: 0}):
        bench = Limited(**limits)
        benches.append(bench)
        for member in (*HEALTHY, BAD):
            bench.contribute(member, vector(1.0))
        assert bench.result(BAD) is not None


def test_a_limit_that_is_lowered_meanwhile_keeps_what_has_begun(benches: list[Limited]) -> None:
    bench = Limited(**{MEMBER: SIZE})
    benches.append(bench)
    bench.contribute(HEALTHY[0], vector(1.0))
    bench.limits = {MEMBER: 1}
    bench.contribute(HEALTHY[0], vector(1.0))  # the same pieces again
    assert not bench.refused(HEALTHY[0])
