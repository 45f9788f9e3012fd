"""Five tasks of a person at the dashboard, done with a mouse whose clicks are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from playwright.sync_api import expect

from tests.dashboard.conftest import Watched

if TYPE_CHECKING:
    from tests.dashboard.test_pages import Seeded


class Hand:
    """A person with a mouse: every click counts. Each task begins on the page of the cluster."""

    def __init__(self, seen: Watched) -> None:
        self.seen = seen
        self.page = seen.go("fleet")
        self.clicks = 0
        expect(self.page.locator("#nodes-title")).to_be_visible()

    def click(self, role: Literal["link", "button", "checkbox"], name: str, nth: int = 0) -> None:
        """Click what has this role and name, the `nth` of several."""
        self.clicks += 1
        found = self.page.get_by_role(role, name=name, exact=role != "checkbox")
        found.nth(nth).click()


def start_again(hand: Hand, seeded: Seeded) -> None:
    hand.click("link", "Jobs")
    hand.click("link", seeded.ended)
    hand.click("button", "Run again")
    hand.click("button", "Run again", -1)  # of the question
    title = hand.page.locator("#job-title")
    expect(title).to_contain_text("ended-")
    expect(title).not_to_have_text(seeded.ended)
    seeded.scene.http.post(f"/api/jobs/{title.text_content()}/stop", json={})


def add_a_laptop(hand: Hand, seeded: Seeded) -> None:
    hand.click("button", "Add a machine")
    dialog = hand.page.get_by_role("dialog")
    lines = dialog.locator(".command")
    for number, words in enumerate(("pip install", "atoll join atoll://")):
        expect(lines.nth(number)).to_contain_text(words)
        hand.clicks += 1
        lines.nth(number).get_by_role("button").click()
        hand.seen.told(f"{words}.*(Copied|Selected)$")  # for two seconds
    hand.page.keyboard.press("Escape")


def see_who_slows_us(hand: Hand, seeded: Seeded) -> None:
    hand.click("link", "Jobs")
    hand.click("link", seeded.running)
    said = hand.page.locator("#job-sentence")
    expect(said).to_contain_text("slowest kitchen-1;")


def find_why_it_failed(hand: Hand, seeded: Seeded) -> None:
    hand.click("link", "Jobs")
    hand.click("link", seeded.failed)
    failure = hand.page.locator("#failure")
    expect(failure).to_contain_text("ZeroDivisionError: division by zero")
    expect(failure).to_contain_text("on attic-gpu")
    expect(failure).to_contain_text("What to do: ")


def compare_two(hand: Hand, seeded: Seeded) -> None:
    hand.click("link", "Jobs")
    hand.click("checkbox", f"Compare {seeded.running}")
    hand.click("checkbox", f"Compare {seeded.done}")
    hand.click("link", "Compare 2")
    page = hand.page
    expect(page.locator("#compare-loss .curve")).to_have_count(2)
    expect(page.locator("#ranking")).to_contain_text("Ranking by held-out loss: 1. finished-")
    expect(page.locator(".differs tbody tr")).to_contain_text(["[job] nodes"])


TASKS = {
    "start a job that ran before": start_again,
    "add a laptop": add_a_laptop,
    "see who slows the others down": see_who_slows_us,
    "find why a job failed": find_why_it_failed,
    "compare two runs and their settings": compare_two,
}
