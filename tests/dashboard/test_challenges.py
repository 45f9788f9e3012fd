"""The page of a verified job: who was checked, when, with what result; how contributions look."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from atoll.verification.challenge import Challenge, Facts
from atoll.verification.record import MemberRecord, SettledChallenge
from atoll.wire.messages import Commitment
from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.scene import Scene

SPEC = """
[job]
name = "strangers"
nodes = 4
trust = "audit"
route = "relay"
device = "cpu"
[strategy]
preset = "diloco"
codec = "int8"
shared_steps = 0
admission = "norms"
"""
WRONG = "round 3: step 7 of 20 was not computed as the job says"
LIE = "round 5: it accused w0 falsely: step 2 of 20 was not computed as the job says"


def verified(scene: Scene) -> str:
    """Start a verified job with one evicted member, one that has a strike, and open challenges."""
    answer = scene.http.post("/api/jobs", json={"spec": SPEC})
    assert answer.status_code == 201, answer.text
    job = str(answer.json()["job"])
    scene.start(job)
    assert scene.hub.hub is not None
    ledger = scene.hub.hub.verification._runtime(job).ledger
    usual = {"rounds": 40, "checked": 2, "passed": 2, "norm": 1.1, "alike": 0.31, "along": 0.44}
    gains = {"own": 0.042, "held_out": 0.031, "rating": 0.36}
    ledger.book.members |= {
        "w0": MemberRecord(**usual, **gains),  # type: ignore[arg-type]
        "w1": MemberRecord(**usual, strikes=[LIE], accused_falsely=1),  # type: ignore[arg-type]
        "w2": MemberRecord(
            rounds=6, checked=3, strikes=["round 1: x", "round 2: y", WRONG], evicted=True,
            norm=0.3, alike=0.99, along=-0.4,
        ),
        "w3": MemberRecord(rounds=40),
    }  # fmt: skip
    now = time.time()
    ledger.book.settled.extend([
        SettledChallenge(3, 3, "w2", "strike", "failed", "w0", "w1", 7, "w2", WRONG, at=now - 90),
        SettledChallenge(4, 5, "w0", "chance", "accused falsely", "w1", "w3", 2, "w1", LIE,
                         at=now - 60),
        SettledChallenge(5, 9, "w0", "newcomer", "passed", "w3", own=0.042, held_out=0.031,
                         at=now - 30),
    ])  # fmt: skip
    facts = Facts(round=39, base="", step=0, length=4, steps=4, slot=3, cursor={}, patience_s=900.0)
    own = Commitment(step=0, length=4, steps=4, slot=3, opening="", closing="", marks=[],
                     contribution="", arithmetic="")  # fmt: skip
    ledger.open[6] = Challenge(6, "w3", "newcomer", facts, own, time.monotonic() + 900.0)
    return job


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
@pytest.mark.every(2)
def test_page_shows_who_was_checked_and_with_what_result(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    job = verified(scene)
    with watched(width=width, scheme=scheme) as seen:
        page = seen.go(f"jobs/{job}")
        page.get_by_role("link", name="Challenges").click()
        expect(page.locator("#trust-rule")).to_contain_text("2 % of all member-rounds")
        expect(page.locator("#trust-rule")).to_contain_text("7 member-rounds checked so far")
        members = page.get_by_role("region", name="Members").locator("tbody tr")
        expect(members).to_have_count(4)
        expect(members.nth(0)).to_contain_text("trusted")
        expect(members.nth(0)).to_contain_text("0.36")
        expect(members.nth(1)).to_contain_text("watched")
        expect(members.nth(1).locator("[data-name='Accused falsely']")).to_have_text("1")
        expect(members.nth(2)).to_contain_text("evicted")
        expect(members.nth(2)).to_contain_text("3 of 3")
        expect(members.nth(2)).to_contain_text(WRONG)
        expect(members.nth(3)).to_contain_text("not checked")
        rows = page.get_by_role("region", name="Challenges").locator("tbody tr")
        expect(rows).to_have_count(4)
        expect(rows.nth(0)).to_contain_text("waits for its state")
        expect(rows.nth(1)).to_contain_text("passed")
        expect(rows.nth(1)).to_contain_text("4.2 %")
        expect(rows.nth(2).locator("[data-name='Strike for']")).to_have_text("w1")
        expect(rows.nth(3).locator("[data-name=Checker]")).to_have_text("w0")
        expect(rows.nth(3).locator("[data-name=When]")).to_contain_text(":")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"challenges-{scheme}-{width}")
        assert seen.problems == []


def test_jobs_among_friends_have_no_such_tab(scene: Scene, watched: Watch) -> None:
    job = scene.submit("friends")
    scene.start(job)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.get_by_role("link", name="Members")).to_be_visible()
        expect(page.get_by_role("link", name="Challenges")).to_be_hidden()
        seen.go(f"jobs/{job}/challenges")
        expect(page.get_by_text("are not verified")).to_be_visible()
        assert seen.problems == []
