"""A challenge ends with the strike of the party that lied, no matter which and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.verification.challenge import Challenge, Facts, Result, Stage
from atoll.verification.trace import FRESH
from atoll.wire.messages import VerificationAnswer
from tests.verification.member_rounds import BASE, Party, digest

PATIENCE_S = 10.0


def challenge(member: Party, steps: int) -> Challenge:
    facts = Facts(
        round=3, base=BASE, step=0, length=steps, steps=steps, slot=0, cursor={},
        packet=member.packet(steps), patience_s=PATIENCE_S,
    )  # fmt: skip
    return Challenge(1, member.name, "chance", facts, member.commitment(steps), PATIENCE_S)


def settle(found: Challenge, parties: list[Party]) -> Challenge:
    """Let all parties do their tasks until the challenge ends; those that are silent run late."""
    by_name = {party.name: party for party in parties}
    now = 0.0
    for _ in range(200):
        found.assign([party.name for party in parties], now)
        if found.stage == Stage.SETTLED:
            return found
        waiting = [by_name[name] for name in found.waits_for if by_name[name].answers]
        if not waiting:
            now = found.deadline
            found.late(now)
        for party in waiting:
            task = found.task(party.name)
            assert task is not None
            if task.kind in (Stage.DEPOSIT, Stage.STATE):
                position = 0 if task.kind == Stage.DEPOSIT else task.last
                if party.state(position) == found.state_before(position):
                    found.deposited(party.name, position, now)
                else:
                    assert party.wrong_from <= position  # the hub refused it
                    party.answers = False
            else:
                found.answer(party.name, party.answer(task), now)
    raise AssertionError(f"it did not end: {found}")


def honest(*names: str) -> list[Party]:
    return [Party(name) for name in names]


@given(st.integers(1, 60))
def test_honest_work_passes(steps: int) -> None:
    member, *others = honest("w0", "w1", "w2")
    found = settle(challenge(member, steps), [member, *others])
    assert (found.result, found.guilty) == (Result.PASSED, "")
    assert member.seen == []  # it only handed over its state


@given(steps=st.integers(1, 60), data=st.data())
def test_first_wrong_step_is_found_and_its_member_struck(steps: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, steps + 2))
    member, *others = Party("w0", wrong_from=at), *honest("w1", "w2")
    found = settle(challenge(member, steps), [member, *others])
    assert (found.result, found.guilty) == (Result.FAILED, "w0")
    assert found.step == min(at, steps)
    assert found.final == (at > steps)


@given(steps=st.integers(2, 60), data=st.data())
def test_false_accuser_is_struck_by_the_judge(steps: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, steps + 2))
    member, judge = honest("w0", "w2")
    checker = Party("w1", wrong_from=at)
    found = settle(challenge(member, steps), [member, checker, judge])
    assert (found.result, found.guilty) == (Result.ACCUSED_FALSELY, "w1")


@given(steps=st.integers(2, 60), data=st.data())
def test_no_honest_party_is_ever_struck(steps: int, data: st.DataObject) -> None:
    """Up to two of five lie, at any steps, or fall silent; a struck one is one of them."""
    parties = honest("w0", "w1", "w2", "w3", "w4")
    liars = data.draw(st.lists(st.sampled_from(parties), max_size=2, unique_by=id))
    for liar in liars:
        liar.wrong_from = data.draw(st.integers(1, steps + 2))
        liar.until = data.draw(st.integers(liar.wrong_from, steps + 2))
        liar.answers = data.draw(st.booleans())
    member = parties[0]
    rest = data.draw(st.permutations(parties[1:]))
    found = settle(challenge(member, steps), [member, *rest])
    assert {found.guilty, *found.contradicted} <= {"", *(liar.name for liar in liars)}


@given(steps=st.integers(2, 60), data=st.data())
def test_two_that_lie_together_convict_nobody_honest(steps: int, data: st.DataObject) -> None:
    """The checker and any of the judges name the same wrong digests; the member is honest."""
    count = data.draw(st.integers(4, 7))
    parties = honest(*(f"w{i}" for i in range(count)))
    at = data.draw(st.integers(1, steps + 2))
    liars = [parties[1], data.draw(st.sampled_from(parties[2:]))]
    for liar in liars:
        liar.wrong_from, liar.friends = at, "together"
    others = data.draw(st.permutations(parties[2:]))
    found = settle(challenge(parties[0], steps), [parties[0], parties[1], *others])
    assert found.guilty in ("", "w1")
    if count > 4:  # a third judge decides
        assert (found.result, found.guilty) == (Result.ACCUSED_FALSELY, "w1")


@given(steps=st.integers(2, 60), data=st.data())
def test_friend_among_the_judges_saves_no_cheat(steps: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, steps + 2))
    cheat, friend = (Party(name, wrong_from=at, friends="together") for name in ("w0", "w1"))
    parties = honest("w2", "w3", "w4")
    judges = data.draw(st.permutations([friend, *parties[1:]]))
    found = settle(challenge(cheat, steps), [cheat, parties[0], *judges])
    assert (found.result, found.guilty) == (Result.FAILED, "w0")
    assert found.contradicted == ["w1"] * (judges.index(friend) < 2)


class MadeUp(Party):
    """Names a wrong digest after so many steps, and the right ones after all others."""

    at = 6

    def state(self, steps: int, *, opening: str = FRESH) -> str:
        right = super().state(steps, opening=opening)
        return digest(right, "made up") if steps == self.at else right


def test_made_up_mark_hides_no_wrong_contribution() -> None:
    """The states agree again after the mark; the contribution is another one."""
    member, others = MadeUp("w0", wrong_from=9), honest("w1", "w2", "w3")
    found = settle(challenge(member, 8), [member, *others])
    assert (found.result, found.guilty, found.step) == (Result.FAILED, "w0", 6)


def test_silent_accuser_is_judged_at_the_step_it_named() -> None:
    """It names a wrong contribution, and a wrong digest after which the states agree again."""
    member, checker, *judges = Party("w0"), MadeUp("w1", wrong_from=9), *honest("w2", "w3")
    checker.at = 7
    found = challenge(member, 8)
    found.deposited("w0", 0, 0.0)
    found.assign(["w1"], 0.0)
    for party in (checker, checker, member):
        task = found.task(party.name)
        assert task is not None
        found.answer(party.name, party.answer(task), 0.0)
    assert found.stage == Stage.STATE
    checker.answers = False
    settle(found, [member, checker, *judges])
    assert (found.result, found.guilty, found.step) == (Result.ACCUSED_FALSELY, "w1", 7)


def test_no_state_is_wanted_while_a_checker_computes() -> None:
    found = challenge(Party("w0"), 8)
    assert found.wants("w0", 0)
    found.deposited("w0", 0, 0.0)
    found.assign(["w1"], 0.0)
    assert not any(found.wants("w1", position) for position in (-1, 0, 8))


def test_silent_member_is_struck_and_silent_checker_replaced() -> None:
    member, checker, other = honest("w0", "w1", "w2")
    checker.answers = False
    found = settle(challenge(member, 8), [member, checker, other])
    assert (found.result, found.checker) == (Result.PASSED, "w2")

    member.answers = False
    found = settle(challenge(member, 8), [member, checker, other])
    assert (found.result, found.guilty) == (Result.FAILED, "w0")
    assert "did not hand over its state" in found.reason


@given(steps=st.integers(1, 60), data=st.data())
def test_accusation_that_is_not_defended_is_judged(steps: int, data: st.DataObject) -> None:
    """The checker falls silent once it has named its digests: who lied is found without it."""
    at = data.draw(st.integers(1, steps + 2))
    liar = data.draw(st.sampled_from(["w0", "w1"]))
    member, checker, *judges = honest("w0", "w1", "w2", "w3")
    (member if liar == "w0" else checker).wrong_from = at
    found = challenge(member, steps)
    found.deposited("w0", 0, 0.0)
    found.assign(["w1"], 0.0)
    task = found.task("w1")
    assert task is not None
    found.answer("w1", checker.answer(task), 0.0)
    checker.answers = False
    settle(found, [member, checker, *judges])
    assert found.guilty == liar
    assert found.checker == "w1"


@pytest.mark.parametrize("usable", [0, 1])
def test_made_up_optimizer_state_is_no_way_out(usable: int) -> None:
    """No member can compute steps with it, so no digest could ever differ."""
    member, *others = honest("w0", "w1", "w2", "w3", "w4")
    for one in others[usable:]:
        one.finds_unusable = True
    found = settle(challenge(member, 8), [member, *reversed(others)])
    assert found.checkers == ["w4", "w3", "w2"]
    assert (found.result, found.guilty) == (Result.FAILED, "w0")
    found = settle(challenge(member, 8), [member, *others])
    # One that can tells the truth: the others lied, and only that no one checks it is known.
    assert found.result == (Result.PASSED if usable else Result.FAILED)
    # Two of three do not convict: a machine may fail by itself.
    others[0].finds_unusable, others[0].answers = False, False
    assert settle(challenge(member, 8), [member, *others[:3]]).result == Result.UNCHECKED


def test_without_anybody_to_ask_nobody_is_struck() -> None:
    member = Party("w0", wrong_from=2)
    assert settle(challenge(member, 8), [member]).result == Result.UNCHECKED
    # A checker disagrees, but no member is there to judge.
    found = settle(challenge(member, 8), [member, Party("w1")])
    assert (found.result, found.guilty) == (Result.UNDECIDED, "")


def test_member_that_leaves_is_not_struck() -> None:
    member = Party("w0")
    found = challenge(member, 8)
    found.gone("w0", 0.0)
    assert (found.result, found.guilty) == (Result.UNCHECKED, "")


@pytest.mark.parametrize("kind", ["replay", "detail", "judge"])
def test_findings_of_others_change_nothing(kind: str) -> None:
    member, checker = honest("w0", "w1")
    found = challenge(member, 8)
    found.deposited("w0", 0, 0.0)
    found.assign(["w1"], 0.0)
    before = found.stage
    for stranger in ("w0", "w2", "w1" if kind != "replay" else "w3"):
        found.answer(stranger, VerificationAnswer(challenge=1, kind=kind, digests=["x"]), 0.0)
    assert found.stage == before == Stage.REPLAY
    assert found.task("w0") is None
    assert checker.seen == []
