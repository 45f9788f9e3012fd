"""Thousands of demands that are alike: the same assignment as one by one, without as many looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.scheduler import assign as module
from atoll.hub.scheduler.assign import Demand, Key, assign, spread
from atoll.hub.scheduler.resources import Capacity, free_share
from tests.hub.scheduler.demands import ask, place


def one_by_one(asks: Iterable[Demand], places: Iterable[Capacity]) -> dict[Key, list[str]]:
    """Return what each demand of single machines is granted, looking at all places each time."""
    here = {one.node: one for one in places}
    kept: set[str] = set()
    granted: dict[Key, list[str]] = {}
    beside: dict[str, Counter[str]] = {}
    for one in sorted(asks, key=Demand.order):
        living = beside.setdefault(one.key[0], Counter(one.beside))
        room = {n: free_share(one.want, p, most=one.most) for n, p in here.items() if n not in kept}
        free = {name: count for name, count in room.items() if count}
        if sum(free.values()) >= one.least:
            wanted = min(one.most, sum(free.values()))
            nodes = spread(free, wanted, beside=living, avoid=one.avoid, places=here)
            for name in nodes:
                here[name] = here[name].with_one_more(one.want.needs)
                living[name] += 1
            granted[one.key] = nodes
        elif not one.essential and not one.running:
            usable = {n: free_share(one.want, p.emptied(), most=one.most) for n, p in here.items()}
            if sum(usable.values()) >= one.least:
                kept |= {name for name, count in usable.items() if count}
    return granted


def demand_of(drawn: tuple[str, int, int, int, bool, int], number: int) -> Demand:
    job, slot, cores, most, essential, priority = drawn
    key: dict[str, Any] = {"slot": slot} if slot >= 0 else {}
    return ask(
        job, **key, cores=float(cores), least=most if slot < 0 else 1,
        most=most if slot < 0 else 1, essential=essential and slot >= 0, priority=priority,
        number=number, avoid="b",
    )  # fmt: skip


DEMANDS = st.lists(
    st.tuples(
        st.sampled_from("xyz"), st.integers(-1, 4), st.integers(0, 2), st.integers(1, 6),
        st.booleans(), st.integers(0, 1),
    ),
    max_size=12, unique_by=lambda drawn: (drawn[0], drawn[1]),
)  # fmt: skip


@settings(max_examples=60)
@given(DEMANDS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=5))
def test_many_at_once_are_granted_what_one_after_the_other_would(
    drawn: list[tuple[str, int, int, int, bool, int]], rooms: list[tuple[int, int]]
) -> None:
    asks = [demand_of(one, number) for number, one in enumerate(drawn)]
    places = [
        place(name, slots=slots, cores=cores)
        for name, (slots, cores) in zip("abcde", rooms, strict=False)
    ]
    assert assign(asks, places).granted == one_by_one(asks, places)


def test_missing_members_do_not_each_look_at_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Counter[str]()

    def counted(want: Any, one: Capacity, *, most: int) -> int:
        looks[one.node] += 1
        return free_share(want, one, most=most)

    monkeypatch.setattr(module, "free_share", counted)
    asks = [ask("j", slot=slot, essential=slot % 2 == 0) for slot in range(1000)]
    places = [place(f"n{number}", slots=number % 2) for number in range(40)]
    found = assign(asks, places)
    assert len(found.granted) == 20
    assert found.short["j"].free == 0
    assert sum(looks.values()) < 200
