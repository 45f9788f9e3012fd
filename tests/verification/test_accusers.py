"""Who accuses others falsely, or judges for a cheat: struck, tried, and trusted again."""

from __future__ import annotations

import random

import msgspec
import pytest

from atoll.verification.challenge import Result
from atoll.verification.draw import CLEAR, Draw
from atoll.verification.ledger import VerificationLedger
from atoll.verification.record import STRIKES, VerificationRecord
from tests.verification.cluster import Cluster


@pytest.mark.parametrize("seed", range(5))
def test_false_accuser_is_evicted_and_its_victims_are_not(seed: int) -> None:
    """Also at the least share: it is tried as a checker early, and again once it has lied."""
    cluster = Cluster(share=0.01, first_rounds=5, seed=seed)
    cluster.parties["w6"].accuses = True
    for _ in range(20):
        cluster.play()
    assert cluster.ledger.book.evicted() == {"w6"}
    assert set(cluster.members_with("strike")) == {"w6"}
    assert cluster.ledger.book.of("w6").accused_falsely == STRIKES
    text = next(one.text for one in cluster.notices if one.kind == "strike")
    assert "it accused w" in text
    assert "falsely" in text


def test_judge_that_two_others_contradict_is_struck() -> None:
    judged = []
    for seed in range(10):
        cluster = Cluster(share=1.0, seed=seed)
        for name in ("w2", "w3"):  # w3 finds what w2 says, no matter which member computes it
            party = cluster.parties[name]
            party.wrong_from, party.friends, party.accuses = 3, "together", name == "w3"
        cluster.play()
        here = [one for one in cluster.notices if "as a judge of w2" in one.text]
        judged += here
        assert cluster.draw.distrusted <= {"w2", "w3"}
        if here:
            assert "w3" in cluster.draw.on_trial.keys() | cluster.ledger.book.evicted()
    assert {one.member for one in judged} == {"w3"}


def test_evicted_accuser_whose_own_round_is_settled_at_once() -> None:
    cluster = Cluster(first_rounds=1)
    ledger = cluster.ledger
    ledger.committed(0, cluster.commitments(), 0.0)
    of_another, own = list(ledger.open.values())[:2]
    accuser = own.member
    for _ in range(STRIKES - 1):
        ledger.book.strike(accuser, "before")
    of_another.checker = accuser
    of_another.settle(Result.ACCUSED_FALSELY, accuser, "it lied")
    own.settle(Result.PASSED, "", "")
    notices = [(one.kind, one.member) for one in ledger.tick([], 0.0)]
    assert notices == [("strike", accuser), ("evicted", accuser)]
    assert own.number not in ledger.open


def test_accuser_that_tells_the_truth_later_is_trusted_again() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.parties["w6"].accuses = True
    while not cluster.members_with("strike"):
        cluster.play()
    cluster.parties["w6"].accuses = False
    assert cluster.draw.distrusted == {"w6"}
    for left in range(CLEAR, 0, -1):
        assert cluster.draw.on_trial == {"w6": left}
        cluster.play()
    assert cluster.draw.distrusted == frozenset()
    trials = [one for one in cluster.ledger.book.settled if one.why == "trial"]
    assert [(one.checker, one.result) for one in trials] == [("w6", "passed")] * CLEAR
    # What it says on trial counts for no one but itself.
    passed = sum(one.passed for one in cluster.ledger.book.members.values())
    assert passed == len(cluster.ledger.book.settled) - CLEAR


def test_trial_goes_on_after_a_restart_of_the_hub() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.parties["w6"].accuses = True
    while not cluster.members_with("strike"):
        cluster.play()
    known = msgspec.json.decode(
        msgspec.json.encode(cluster.ledger.record()), type=VerificationRecord
    )
    again = VerificationLedger(Draw(random.Random(1), share=0.0))
    again.recall(known)
    assert (again.draw.on_trial, again.draw.watched) == ({"w6": CLEAR}, {})
