"""Stretches of the data: no member holds two, none has two holders, the least read go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.rounds.data_slots import DataSlots, assign, progress
from atoll.wire.messages import Lease

CURSORS = st.dictionaries(
    st.integers(0, 5),
    st.fixed_dictionaries({"data_pass": st.integers(0, 2), "offset": st.integers(0, 9)}),
)
MEMBERS = st.sets(st.sampled_from([f"w{slot}" for slot in range(6)]))


@given(MEMBERS, CURSORS, st.permutations(range(6)), MEMBERS)
def test_members_get_one_slot_each_least_read_first(
    members: set[str], cursors: dict[int, dict[str, int]], slots: list[int], holders: set[str]
) -> None:
    held = dict(zip(sorted(holders), slots, strict=False))
    assigned = assign(members, slots=6, cursors=cursors, held=held)
    assert assigned.keys() == members
    assert len(set(assigned.values())) == len(members)
    given_out = [progress(cursors.get(slot, {})) for slot in assigned.values()]
    left = [progress(cursors.get(slot, {})) for slot in set(range(6)) - set(assigned.values())]
    assert not given_out or not left or max(given_out) <= min(left)


@given(st.permutations(range(4)))
def test_members_keep_what_they_hold_when_all_slots_are_taken(slots: list[int]) -> None:
    held = {f"w{member}": slot for member, slot in enumerate(slots)}
    assert assign(held, slots=4, cursors={}, held=held) == held


def test_own_numbers_come_first_among_equals() -> None:
    assert assign(["w1", "w3"], slots=4, cursors={}, held={}) == {"w1": 1, "w3": 3}


def test_a_slot_that_is_behind_is_caught_up() -> None:
    cursors = {0: {"offset": 10}, 1: {"offset": 10}}
    assigned = assign(["w0", "w1"], slots=3, cursors=cursors, held={"w0": 0, "w1": 1})
    assert sorted(assigned.values()) == [0, 2]


def test_newcomer_gets_a_slot_that_nobody_holds() -> None:
    leases = DataSlots(3, cursors={2: {"offset": 5}})
    leases.hold_only({"w0": 1})
    assert leases.lease("w1") == Lease(0)
    assert leases.lease("w2") == Lease(2, {"offset": 5})
    assert leases.lease("w1") == Lease(0)


def test_wrong_positions_are_named() -> None:
    leases = DataSlots(2, cursors={0: {"data_pass": 1, "offset": 5}})
    leases.hold_only({"w0": 0})
    assert leases.wrong("w0", Lease(0, {"data_pass": 1, "offset": 6})) == ""
    assert "moves back" in leases.wrong("w0", Lease(0, {"data_pass": 0, "offset": 9}))
    assert "not its own" in leases.wrong("w0", Lease(1))
    assert "not its own" in leases.wrong("w1", Lease(0, {"data_pass": 2}))
    assert "does not exist" in leases.wrong("w1", Lease(7))


def test_members_that_do_not_train_hold_nothing_after_the_deal() -> None:
    leases = DataSlots(3)
    leases.hold_only({"w0": 0, "w1": 1, "w2": 2})
    assert leases.renew(["w0", "w2"]).keys() == {"w0", "w2"}
    assert leases.held == {"w0": 0, "w2": 2}
    assert leases.lease("w1") == Lease(1)
