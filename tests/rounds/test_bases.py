from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.rounds.bases import Bases
from atoll.rounds.checks import majority_base
from atoll.rounds.member_states import MOST_DONORS, MemberStates
from atoll.wire.states import RoundMemberState

MEMBERS = st.sampled_from([f"w{n}" for n in range(6)])


@given(st.lists(st.tuples(MEMBERS, st.sampled_from(["a", "b", "c", ""]))), MEMBERS)
def test_the_majority_is_that_of_all_others(reports: list[tuple[str, str]], asker: str) -> None:
    bases, plain = Bases(), {}
    for member, digest in reports:
        if digest:
            bases.put(member, digest)
            plain[member] = digest
        else:
            bases.forget(member)
            plain.pop(member, None)
    assert dict(bases) == plain
    others = {m: d for m, d in plain.items() if m != asker}
    assert bases.majority_without(asker) == (majority_base(others) if others else "")


def test_of_many_members_each_newcomer_hears_of_a_few_others() -> None:
    members = MemberStates()
    for slot in range(500):
        members.proved(f"w{slot}", "base")
    members.states["w3"] = RoundMemberState.GONE
    members.forget("w7")
    members.proved("w7", "base")
    first, other = members.holders("w0", ()), members.holders("w250", ["w251"])
    assert len(first) == len(set(first)) == MOST_DONORS
    assert len(other) == MOST_DONORS
    assert not set(first) & set(other)
    assert {"w0", "w3"}.isdisjoint(first)
    assert {"w250", "w251"}.isdisjoint(other)
