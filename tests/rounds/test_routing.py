"""Which way tensors take, from who reaches whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.rounds.routing import choose_route, find_sites
from atoll.wire.messages import RoundJoin

FIVE = [f"w{slot}" for slot in range(5)]
DIALS = {member: [f"10.0.0.{slot}:1"] for slot, member in enumerate(FIVE)}


def joins(reachable: dict[str, list[str]]) -> dict[str, RoundJoin]:
    return {member: RoundJoin(0, "b", names) for member, names in reachable.items()}


def test_two_houses_reduce_inside_and_relay_between() -> None:
    reachable = {
        "w0": ["w2"], "w2": ["w0"], "w1": ["w3", "w4"], "w3": ["w1", "w4"], "w4": ["w1", "w3"],
    }  # fmt: skip
    route = choose_route("auto", joins(reachable), DIALS)
    assert (route.name, route.needs_reducer) == ("hierarchical", True)
    assert route.sites == [["w0", "w2"], ["w1", "w3", "w4"]]
    assert route.stores == ["10.0.0.0:1", "10.0.0.1:1"]


def test_one_that_reaches_nobody_is_a_site_without_a_store() -> None:
    route = choose_route("auto", joins({"w0": ["w1"], "w1": ["w0"], "w2": []}), DIALS)
    assert (route.sites, route.stores) == ([["w0", "w1"], ["w2"]], ["10.0.0.0:1", ""])


@pytest.mark.parametrize(
    ("preference", "reachable", "relay_only", "expected"),
    [
        ("auto", {"w0": []}, False, "alone"),
        ("auto", {"w0": ["w1"], "w1": ["w0"]}, False, "direct"),
        ("auto", {"w0": ["w1"], "w1": ["w0"]}, True, "relay"),
        ("auto", {"w0": ["w1"], "w1": []}, False, "relay"),
        ("auto", {"w0": ["w1"], "w1": ["w0"], "w2": []}, True, "relay"),
        ("relay", {"w0": ["w1"], "w1": ["w0"]}, False, "relay"),
        ("direct", {"w0": [], "w1": []}, True, "direct"),
    ],
)
def test_route(
    preference: str, reachable: dict[str, list[str]], relay_only: bool, expected: str
) -> None:
    route = choose_route(preference, joins(reachable), DIALS, relay_only=relay_only)
    assert route.name == expected


def test_members_that_cannot_be_dialled_are_relayed() -> None:
    reachable = {"w0": ["w1"], "w1": ["w0"], "w2": []}
    assert choose_route("auto", joins(reachable), {}).name == "relay"


@given(st.lists(st.tuples(st.sampled_from(FIVE), st.sampled_from(FIVE))))
def test_sites_group_members_that_reach_each_other(
    links: list[tuple[str, str]],
) -> None:
    reachable = {m: [b for a, b in links if a == m and b != m] for m in FIVE}
    sites = find_sites(FIVE, reachable)
    assert sorted(m for site in sites for m in site) == FIVE
    assert [site[0] for site in sites] == sorted(site[0] for site in sites)
    for site in sites:
        assert site == sorted(site)
        assert all(b in reachable.get(a, ()) for a in site for b in site if a != b)
