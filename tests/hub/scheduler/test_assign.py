"""Who gets which place: nothing is given twice, no job is overtaken for ever, order rules."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.hub.scheduler.assign import WHOLE, Assignment, Demand, assign
from atoll.hub.scheduler.resources import Capacity, Usage, free_share
from tests.hub.scheduler.demands import ask, place
from tests.tiers import examples

NAMES = ("n0", "n1", "n2", "n3")
SLOW = settings(max_examples=examples(150), deadline=None)


@st.composite
def places(draw: st.DrawFn) -> list[Capacity]:
    return [
        place(
            name,
            slots=draw(st.integers(0, 3)),
            cores=draw(st.integers(1, 4)),
            memory_gb=draw(st.integers(1, 8)),
            connected=draw(st.booleans()) or draw(st.booleans()),
            draining=draw(st.sampled_from(["", "", "", "old"])),
            used=Usage(processes=draw(st.integers(0, 2)), cores=draw(st.integers(0, 2))),
        )
        for name in draw(st.sets(st.sampled_from(NAMES), min_size=1))
    ]


@st.composite
def asks(draw: st.DrawFn) -> list[Demand]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, 4))
        running = draw(st.booleans())
        made.append(
            ask(
                f"j{number}",
                slot=0 if running else WHOLE,
                cores=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0])),
                memory_gb=draw(st.sampled_from([0.0, 1.0, 6.0])),
                least=1 if running else least,
                most=1 if running else least + draw(st.integers(0, 2)),
                priority=draw(st.integers(-1, 1)),
                number=number,
                essential=running and draw(st.booleans()),
                avoid=draw(st.sampled_from(["", *NAMES])) if running else "",
                on=draw(st.sampled_from([(), (), ("n0",), ("n1", "n2")])),
            )
        )
    return made


def after(demands: list[Demand], there: list[Capacity], made: Assignment) -> dict[str, Capacity]:
    """Return the places as they are when everything granted runs."""
    now = {p.node: p for p in there}
    for one in demands:
        for node in made.granted.get(one.key, []):
            now[node] = now[node].with_one_more(one.want.needs)
    return now


@SLOW
@given(asks(), places())
def test_no_node_is_ever_over_committed(demands: list[Demand], there: list[Capacity]) -> None:
    made = assign(demands, there)
    before = {p.node: p for p in there}
    for node, now in after(demands, there, made).items():
        added = now.used.processes - before[node].used.processes
        if not added:
            continue
        assert now.connected
        assert not now.draining
        assert now.used.processes <= now.info.slots
        given_here = [a for a in demands for n in made.granted.get(a.key, []) if n == node]
        if any(a.want.needs.cores for a in given_here):
            assert now.used.cores <= now.info.cores + 1e-6
        assert now.used.memory_bytes <= now.info.memory_bytes + 1
        assert all(not a.want.on or node in a.want.on for a in given_here)


@SLOW
@given(asks(), places())
def test_everybody_gets_enough_or_nothing_and_is_told_why(
    demands: list[Demand], there: list[Capacity]
) -> None:
    made = assign(demands, there)
    for one in demands:
        nodes = made.granted.get(one.key, [])
        assert not nodes or one.least <= len(nodes) <= one.most
        if not nodes and not one.running:
            short = made.short[one.key[0]]
            assert short.free < short.wanted == one.least


@SLOW
@given(asks(), places())
def test_nobody_takes_what_a_waiting_job_before_it_could_use(
    demands: list[Demand], there: list[Capacity]
) -> None:
    made = assign(demands, there)
    ordered = sorted(demands, key=Demand.order)
    for index, first in enumerate(ordered):
        if first.running or first.key in made.granted:
            continue
        empty = {p.node: free_share(first.want, p.emptied(), most=first.most) for p in there}
        if sum(empty.values()) < first.least:
            continue  # it can never start here: it holds up no other job
        for later in ordered[index + 1 :]:
            used = set(made.granted.get(later.key, []))
            assert not used & {node for node, count in empty.items() if count}


@SLOW
@given(asks(), places(), st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_matter(
    demands: list[Demand], there: list[Capacity], chance: random.Random
) -> None:
    made = assign(demands, there)
    chance.shuffle(demands)
    chance.shuffle(there)
    assert assign(demands, there) == made


@SLOW
@given(asks(), places())
def test_job_that_fits_starts_unless_one_is_ahead(
    demands: list[Demand], there: list[Capacity]
) -> None:
    first = min(demands, key=Demand.order)
    fits = sum(free_share(first.want, p, most=first.most) for p in there) >= first.least
    assert (first.key in assign(demands, there).granted) == fits


@pytest.mark.parametrize("seed", range(5))
def test_large_job_starts_though_small_ones_never_cease_to_come(seed: int) -> None:
    """Four small jobs come for every one that ends; the large one needs all nodes."""
    chance = random.Random(seed)
    there = [place(name, slots=1) for name in NAMES]
    running: dict[str, tuple[str, int]] = {f"old{i}": (NAMES[i], 3 + i) for i in range(4)}
    waiting = [ask("large", least=4, most=4, number=0)]
    for now in range(60):
        running = {job: (node, end) for job, (node, end) in running.items() if end > now}
        used = Counter(node for node, _ in running.values())
        waiting += [ask(f"s{now}-{i}", number=1 + 4 * now + i) for i in range(4)]
        made = assign(waiting, [replace(p, used=Usage(processes=used[p.node])) for p in there])
        if ("large", WHOLE) in made.granted:
            assert now <= 6
            return
        for (job, _), (node,) in made.granted.items():
            running[job] = (node, now + 1 + chance.randrange(5))
        waiting = [one for one in waiting if one.key not in made.granted]
    pytest.fail("the large job was starved")


def test_job_that_can_never_start_here_keeps_nothing() -> None:
    made = assign([ask("large", least=9, most=9), ask("small", number=1)], [place("n0")])
    assert made.granted == {("small", WHOLE): ["n0"]}
    assert made.short["large"].headline == "needs 9 nodes, 2 are free"


def test_stalled_job_comes_first_but_grows_by_priority() -> None:
    there = [place("n0", slots=1)]
    urgent = ask("new", priority=9)
    lost = ask("old", slot=0, essential=True, number=1)
    assert assign([urgent, lost], there).granted == {("old", 0): ["n0"]}
    assert assign([urgent, replace(lost, essential=False)], there).granted == {
        ("new", WHOLE): ["n0"]
    }
    equal = replace(urgent, priority=0)
    assert assign([equal, replace(lost, essential=False)], there).granted == {("old", 0): ["n0"]}


def test_process_avoids_its_jobs_nodes_and_the_last_one() -> None:
    there = [place("n0"), place("n1"), place("n2", slots=3)]
    again = ask("j", slot=3, avoid="n2", beside={"n0": 1})
    assert assign([again], there).granted == {("j", 3): ["n1"]}
    assert assign([replace(again, avoid="")], there).granted == {("j", 3): ["n2"]}


def test_large_job_keeps_returning_nodes_after_restart() -> None:
    demands = [ask("large", least=4, most=4), ask("small", number=1)]
    assert not assign(demands, [place("n0")], settling=True).granted
    assert assign(demands, [place("n0")]).granted == {("small", WHOLE): ["n0"]}
