"""Which machines make up which island: whole islands, different machines, one network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import NeedsTable, parse_spec
from atoll.hub.scheduler.assign import (
    WHOLE,
    Demand,
    FreeCapacity,
    GangPlacement,
    assign,
    network_of,
)
from atoll.hub.scheduler.resources import ResourceRequest, request_of
from tests.hub.scheduler.demands import place
from tests.tiers import examples

COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), min_size=1)


def ask(*, least: int, most: int, slot: int = WHOLE, machines: int = 2, **more: object) -> Demand:
    want = ResourceRequest(needs=NeedsTable())
    return Demand(key=("j", slot), want=want, least=least, most=most, machines=machines, **more)  # type: ignore[arg-type]


@settings(max_examples=examples(200), deadline=None)
@given(COUNTS, st.integers(1, 4), st.integers(1, 4))
def test_islands_get_different_machines_if_possible(
    counts: dict[str, int], islands: int, machines: int
) -> None:
    if islands * machines > sum(counts.values()):
        return
    placement = GangPlacement(
        rooms={node: FreeCapacity(count=count, slots=count) for node, count in counts.items()}
    )
    nodes = placement.islands([machines] * islands)
    assert len(nodes) == islands * machines
    assert all(count <= counts[node] for node, count in Counter(nodes).items())
    if sum(min(count, islands) for count in counts.values()) >= islands * machines:
        parts = [nodes[n : n + machines] for n in range(0, len(nodes), machines)]
        assert all(len(set(part)) == machines for part in parts), parts


def test_waiting_job_starts_with_whole_islands_only() -> None:
    five = [place(name, slots=1) for name in "abcde"]
    made = assign([ask(least=2, most=6)], five)
    assert made.granted == {("j", WHOLE): ["a", "b", "c", "d"]}
    made = assign([ask(least=6, most=6)], five)
    assert made.granted == {}
    assert made.short["j"].headline == "needs 6 nodes, 5 are free"


def test_only_machine_holds_a_whole_island() -> None:
    made = assign([ask(least=4, most=4)], [place("big", slots=4)])
    assert made.granted == {("j", WHOLE): ["big"] * 4}
    made = assign([ask(least=2, most=2)], [place("big", slots=4), place("small", slots=1)])
    assert made.granted == {("j", WHOLE): ["big", "small"]}


def test_island_lies_in_one_network_that_has_room_for_it() -> None:
    sources = {"a": "10.0.0.1", "b": "10.0.1.1", "c": "10.0.0.2", "d": "10.0.1.2", "e": "10.0.1.3"}
    there = [replace(place(name, slots=1), source=source) for name, source in sources.items()]
    made = assign([ask(least=4, most=4)], there)
    assert made.granted == {("j", WHOLE): ["a", "c", "b", "d"]}
    made = assign([ask(least=3, most=3, machines=3)], there)
    assert made.granted == {("j", WHOLE): ["b", "d", "e"]}
    made = assign([ask(least=5, most=5, machines=5)], there)
    assert sorted(made.granted["j", WHOLE]) == list("abcde"), "better than not at all"


def test_lost_machine_is_replaced_near_the_others() -> None:
    sources = {"a": "10.0.0.1", "b": "10.0.1.1", "c": "10.0.0.2", "d": "10.0.1.2"}
    there = [replace(place(name), source=source) for name, source in sources.items()]
    demand = ask(slot=0, least=1, most=1, there=("b",), avoid="d", beside={"b": 1})
    assert assign([demand], there).granted == {("j", 0): ["a"]}, "rather far than where it failed"
    demand = replace(demand, avoid="")
    assert assign([demand], there).granted == {("j", 0): ["d"]}
    assert assign([demand], there[1:2]).granted == {("j", 0): ["b"]}, "there is no other"


def test_island_that_needs_all_its_machines_takes_none_alone() -> None:
    one = [place("a", slots=1)]
    assert assign([ask(slot=1, least=2, most=2)], one).granted == {}
    assert assign([ask(slot=1, least=1, most=2)], one).granted == {("j", 1): ["a"]}


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("192.168.7.31", "192.168.7.0/24"),
        ("::ffff:192.168.7.31", "192.168.7.0/24"),
        ("93.184.216.34", "93.184.216.34"),
        ("2a02:8109:9a40:1::7", "2a02:8109:9a40:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", ""),
        ("", ""),
    ],
)
def test_network_is_read_off_an_address(source: str, network: str) -> None:
    assert network_of(source) == network


def test_machine_asks_for_its_own_ranks_accelerators() -> None:
    island = '[island]\nranks = 8\nmachines = 2\nencryption = "off"\n'
    text = f'[job]\nname = "x"\n[strategy]\ninner = "fsdp"\n{island}'
    assert request_of(parse_spec(text)).gpus == 4
