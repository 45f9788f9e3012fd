"""Many faults at random times; and that the simulation itself can be trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

import atoll.hub.rounds.store
import atoll.rounds.data_slots
from tests.faults.simulation.faults import Cell
from tests.faults.simulation.schedule import run_cell, run_random
from tests.tiers import sampled

BLOCKS = 8
SEEDS = 40
"""Random schedules of one block."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "block",
    sampled(
        range(BLOCKS),
        lambda block: block < 2,
        "tests/faults/test_random.py::test_no_promise_is_broken_by_several_faults_at_once",
    ),
)
def test_no_promise_is_broken_by_several_faults_at_once(block: int, schedules: int) -> None:
    first = block * 1_000_000
    for seed in range(first, first + SEEDS + schedules // BLOCKS):
        outcome = run_random(seed)
        assert not outcome.broken, outcome.explain()


def test_seed_names_a_schedule_exactly() -> None:
    first, again = run_random(11), run_random(11)
    assert first.trace == again.trace
    assert first.fingerprint != run_random(12).fingerprint


# ------------------------------------------------- it notices what is wrong with a hub or member


def broken_by(cell: Cell, seeds: range = range(12)) -> list[str]:
    """Return the complaints of the first schedule that has any."""
    return next((o.broken for s in seeds if (o := run_cell(cell, s)).broken), [])


def test_verdict_that_is_told_before_it_is_durable_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = atoll.hub.rounds.store.RoundStore.add_verdict

    async def told_first(self: Any, *args: Any, **kwargs: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(0.3)
            await store(self, *args, **kwargs)

        tasks.append(asyncio.get_running_loop().create_task(later()))

    tasks: list[Any] = []
    monkeypatch.setattr(atoll.hub.rounds.store.RoundStore, "add_verdict", told_first)
    assert broken_by(Cell("kill", "verdict told", "hub", "relay"))


def test_slot_that_is_leased_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_the_same(members: Iterable[str], **more: Any) -> dict[str, int]:
        return dict.fromkeys(members, 0)

    monkeypatch.setattr(atoll.rounds.data_slots, "assign", all_the_same)
    assert broken_by(Cell("slow", "join wait", "worker", "relay"))


def test_state_that_is_damaged_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.faults.simulation.state import Replica

    whole = Replica.from_bytes.__func__  # type: ignore[attr-defined]

    def damaged(cls: type[Replica], data: bytes) -> Replica:
        replica: Replica = whole(cls, data)
        replica.vector = replica.vector + 1e-3
        return replica

    monkeypatch.setattr(Replica, "from_bytes", classmethod(damaged))
    assert broken_by(Cell("kill", "recovering: chunk", "donor", "relay"))
