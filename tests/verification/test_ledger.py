"""Challenges over many rounds: who is drawn, who is struck, who is evicted."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from atoll.verification.challenge import LONGEST
from atoll.verification.draw import CLEAR, Draw
from atoll.verification.ledger import MemberRound, VerificationLedger
from atoll.verification.record import STRIKES, MemberBook, VerificationRecord
from atoll.verification.trace import FRESH
from atoll.wire.messages import Look
from tests.verification.cluster import NAMES, STEPS, Cluster, own


def test_every_newcomer_is_checked_once_and_passes() -> None:
    cluster = Cluster()
    for _ in range(10):
        cluster.play()
    assert {
        name: one.checked for name, one in cluster.ledger.book.members.items()
    } == dict.fromkeys(NAMES, 1)
    assert cluster.notices == []
    assert {one.why for one in cluster.ledger.book.settled} == {"newcomer"}


@pytest.mark.parametrize("seed", range(5))
def test_cheats_are_evicted_within_20_rounds(seed: int) -> None:
    cluster = Cluster(share=0.02, seed=seed)
    cluster.parties["w2"].wrong_from = 3
    cluster.parties["w5"].wrong_from = STEPS + 1
    for _ in range(20):
        cluster.play()
    assert cluster.ledger.book.evicted() == {"w2", "w5"}
    assert set(cluster.members_with("strike")) == {"w2", "w5"}
    assert cluster.members_with("strike").count("w2") == STRIKES
    assert sorted(cluster.members_with("evicted")) == ["w2", "w5"]


def test_odd_newcomers_are_checked_at_once_and_need_no_budget() -> None:
    cluster = Cluster(first_rounds=1000)
    looks = dict.fromkeys(NAMES, Look(norm=1.0, alike=0.1, along=0.9))
    looks |= dict.fromkeys(("w2", "w3", "w4"), Look(norm=0.1, alike=0.1, along=0.9))
    cluster.ledger.committed(0, cluster.commitments(), 0.0, looks=looks)
    opened = {one.member for one in cluster.ledger.open.values() if one.why == "odd contribution"}
    assert opened == {"w2", "w3", "w4"}


def test_first_check_counts_towards_the_share_of_its_member() -> None:
    """Over many rounds a member is checked `share` times; never for certain not."""
    draw = Draw(random.Random(3), share=0.05)
    drawn: list[int] = []
    for round_ in range(4000):
        for member in draw.drawn(round_, ["w0"]):
            draw.challenged(member)
            drawn.append(round_)
    assert 0.04 < len(drawn) / 4000 < 0.06
    early = 0
    for seed in range(400):
        draw = Draw(random.Random(seed), share=0.05)
        for round_ in range(25):
            for member in draw.drawn(round_, ["w0"]):
                draw.challenged(member)
                early += 1
    # One as a newcomer, and a tenth of 0.05 of the rounds since; without that: 1 + 1.1.
    assert 1.02 < early / 400 < 1.25


def test_member_with_a_strike_is_checked_until_it_passed_some() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.parties["w3"].wrong_from = 1
    cluster.play()
    assert cluster.members_with("strike") == ["w3"]
    cluster.parties["w3"].wrong_from = 1_000
    for _ in range(CLEAR + 3):
        cluster.play()
    record = cluster.ledger.book.of("w3")
    assert (record.checked, record.passed) == (1 + CLEAR, CLEAR)
    assert not record.evicted


def changed(known: MemberRound, **changes: object) -> MemberRound:
    return replace(known, commitment=msgspec.structs.replace(own(known), **changes))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slot": 5}, "it read slot 5"),
        ({"cursor": {"data_pass": 0, "offset": 64}}, r"it read slot 0 from \(0, 64\)"),
        ({"steps": 3}, "it took 3 steps instead of 8"),
        ({"step": 80}, "from 80, the others 8 from 8"),
        ({"marks": []}, "it named 0 marked steps"),
        ({"opening": "made up"}, "its optimizer began in a state"),
        (None, "it committed to nothing"),
    ],
)
def test_commitment_that_contradicts_the_hub_is_a_strike(
    change: dict[str, object] | None, text: str
) -> None:
    cluster = Cluster(first_rounds=10_000)
    cluster.play()
    known = cluster.commitments()["w4"]
    wrong = replace(known, commitment=None) if change is None else changed(known, **change)
    cluster.play({"w4": wrong})
    assert cluster.members_with("strike") == ["w4"]
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(cluster.notices[0].text)


def test_optimizer_may_begin_anew_or_go_on_and_nothing_else() -> None:
    cluster = Cluster(first_rounds=10_000)
    cluster.play()
    cluster.openings["w1"] = FRESH  # a new process
    cluster.play()
    cluster.play()
    assert cluster.notices == []


def test_first_checked_round_of_a_new_job_begins_fresh() -> None:
    cluster = Cluster()
    cluster.round = 1  # nothing was committed to in round 0
    cluster.openings["w3"] = "made up"
    looks = {name: Look(norm=1.0, alike=0.1, along=0.9) for name in NAMES}
    notices = cluster.ledger.committed(1, cluster.commitments(), 0.0, looks=looks)
    assert [(one.kind, one.member) for one in notices] == [("strike", "w3")]


def test_members_that_compute_otherwise_are_not_compared() -> None:
    cluster = Cluster(first_rounds=1)
    for _ in range(2):
        members = cluster.commitments()
        cluster.play({n: changed(members[n], arithmetic="avx512") for n in ("w0", "w1")})
    assert cluster.members_with("unchecked") == ["w0", "w1"]  # reported once
    for one in cluster.ledger.book.settled:
        assert one.result == "passed"
        assert not {one.member, one.checker} & {"w0", "w1"}


def test_odd_contributions_are_checked_within_a_budget() -> None:
    cluster = Cluster(first_rounds=10_000)
    for _ in range(50):
        cluster.play(looks={name: Look(1.0, 0.99 if name == "w7" else 0.1) for name in NAMES})
    why = [one.why for one in cluster.ledger.book.settled]
    assert set(why) == {"odd contribution"}
    assert 3 <= len(why) <= 6  # 1 % of 400 member-rounds, and what is there at the beginning
    assert cluster.notices == []


def test_share_is_the_share_of_member_rounds() -> None:
    draw = Draw(random.Random(5), share=0.05, first_rounds=1)
    draw.drawn(0, NAMES)
    for name in NAMES:
        draw.challenged(name)
    drawn = sum(len(draw.drawn(round_, NAMES)) for round_ in range(1, 2_001))
    assert 0.045 < drawn / (2_000 * len(NAMES)) < 0.055


def test_leaving_during_a_challenge_only_delays_it() -> None:
    cluster = Cluster(first_rounds=1)
    members = cluster.commitments()
    cluster.ledger.committed(0, members, 0.0)
    assert "w0" in {one.member for one in cluster.ledger.open.values()}
    cluster.ledger.gone("w0", 1.0)
    assert cluster.ledger.book.of("w0").strikes == []
    cluster.ledger.open.clear()
    cluster.openings, cluster.round = {n: own(members[n]).closing for n in NAMES}, 1
    cluster.openings["w0"] = FRESH
    cluster.play()
    assert [one.why for one in cluster.ledger.book.settled if one.member == "w0"][-1] == "again"


def test_machines_that_all_leave_can_check_each_other_again() -> None:
    cluster = Cluster(first_rounds=1)
    members = cluster.commitments()
    cluster.ledger.committed(0, members, 0.0)
    assert len(cluster.ledger.open) == len(NAMES)
    for name in NAMES:
        cluster.ledger.gone(name, 1.0)
    cluster.openings, cluster.round = dict.fromkeys(NAMES, FRESH), 1
    cluster.play()
    passed = [one.member for one in cluster.ledger.book.settled if one.result == "passed"]
    assert sorted(passed) == NAMES
    assert cluster.notices == []


def test_challenges_that_a_hub_restart_cut_off_are_made_again() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.parties["w3"].wrong_from = 1
    members = cluster.commitments()
    cluster.ledger.committed(0, members, 0.0)
    assert len(cluster.ledger.open) == len(NAMES)
    written = msgspec.json.encode(cluster.ledger.record())
    cluster.ledger = VerificationLedger(Draw(random.Random(2), share=0.0))
    cluster.ledger.recall(msgspec.json.decode(written, type=VerificationRecord))
    cluster.openings, cluster.round = {n: own(members[n]).closing for n in NAMES}, 1
    cluster.play()
    assert {one.why for one in cluster.ledger.book.settled} == {"again"}
    assert len(cluster.ledger.book.settled) == len(NAMES)
    assert cluster.members_with("strike") == ["w3"]


def test_slow_helper_that_says_so_is_waited_for_and_not_for_ever() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.ledger.committed(0, cluster.commitments(), 0.0)
    number, challenge = next(iter(cluster.ledger.open.items()))
    patience_s = challenge.facts.patience_s
    cluster.ledger.deposited(challenge.member, number, 0, 0.0)
    cluster.ledger.tick(NAMES, 0.0)
    first = challenge.checker
    # Whose state is awaited has nothing to compute.
    other = next(one for one in cluster.ledger.open.values() if one.stage == "deposit")
    before = other.deadline
    cluster.ledger.working(other.member, [other.number], 1.0)
    assert other.deadline == before
    for half in range(1, 30):
        now = half * patience_s / 2
        cluster.ledger.working(first, [number], now)
        cluster.ledger.tick(NAMES, now)
        if challenge.checker != first:
            break
    assert now == LONGEST * patience_s


def test_strikes_survive_a_restart_of_the_hub() -> None:
    cluster = Cluster(first_rounds=1)
    cluster.parties["w3"].wrong_from = 1
    cluster.play()
    written = msgspec.json.encode(cluster.ledger.record())
    again = VerificationLedger(Draw(random.Random(2), share=0.0))
    again.recall(msgspec.json.decode(written, type=VerificationRecord))
    assert again.book.of("w3").strikes == cluster.ledger.book.of("w3").strikes
    assert again.draw.watched == {"w3": CLEAR}
    assert again.number == cluster.ledger.number
    assert [one.member for one in again.book.settled] == [
        one.member for one in cluster.ledger.book.settled
    ]
    first = again.committed(1, cluster.commitments(), 0.0)
    assert first == []  # what it does not know cannot contradict anything


def test_evicted_member_that_comes_back_is_evicted_again() -> None:
    cluster = Cluster(first_rounds=1)
    members = cluster.commitments()
    for number in range(3):
        cluster.ledger.book.strike("w1", f"round {number}")
    notices = cluster.ledger.committed(0, members, 0.0)
    assert [(one.kind, one.member) for one in notices] == [("evicted", "w1")]
    assert "w1" not in {one.member for one in cluster.ledger.open.values()}


def test_round_that_a_restarted_hub_did_not_see_is_no_strike() -> None:
    cluster = Cluster(first_rounds=10_000)
    cluster.play()
    again = VerificationLedger(Draw(random.Random(2), share=0.0, first_rounds=10_000))
    again.recall(cluster.ledger.record())
    cluster.play()  # only the members and the old process know of this round
    cluster.ledger = again
    cluster.play()
    assert cluster.notices == []
    # But from then on it sees every round.
    cluster.openings["w2"] = "made up"
    cluster.play()
    assert cluster.members_with("strike") == ["w2"]


def test_member_that_left_a_round_out_has_to_begin_anew() -> None:
    cluster = Cluster(first_rounds=10_000)
    cluster.play()
    members = cluster.commitments()
    kept = members.pop("w5")
    cluster.notices += cluster.ledger.committed(1, members, 0.0)
    cluster.openings = {name: own(known).closing for name, known in members.items()}
    cluster.openings["w5"], cluster.round = own(kept).closing, 2
    cluster.play()
    assert cluster.members_with("strike") == ["w5"]


def test_third_strike_evicts() -> None:
    book = MemberBook()
    assert [book.strike("w1", f"round {i}") for i in range(4)] == [False, False, True, False]
    assert book.evicted() == {"w1"}
