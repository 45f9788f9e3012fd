"""The dashboard in a real browser, fed by a real hub with a real session."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from atoll.hub.app import HubOptions
from atoll.hub.pages import plotly_script
from atoll.hub.server import HubServer
from atoll.wire.messages import (
    Event,
    LogLines,
    Metrics,
    NodeInfo,
    Point,
    Register,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)
from tests.hub.peer import Peer

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

INFO = NodeInfo("kitchen", "Linux", "3.11", "0.1", cores=8, memory_bytes=16 * 10**9)
WAIT_MS = 10_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield opened
        opened.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as server:
        yield server


class Watched:
    """A page that remembers whom it asked and what went wrong."""

    def __init__(self, page: Page, hub: HubServer) -> None:
        self.page = page
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(httpx.URL(request.url).netloc.decode()))
        page.goto(f"{hub.url}/?token={hub.operator_token}")

    def _told(self, message: object) -> None:
        if getattr(message, "type", "") in ("error", "warning"):
            self.problems.append(str(getattr(message, "text", "")))


@contextlib.contextmanager
def watched(
    browser: Browser, hub: HubServer, *, width: int = 1300, scheme: str = "light"
) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    try:
        yield Watched(context.new_page(), hub)
    finally:
        context.close()


def submit(hub: HubServer, *, name: str = "toy", nodes: int = 1) -> str:
    spec = f'[job]\nname = "{name}"\nnodes = {nodes}\n[train]\nsteps = 100\n'
    answer = httpx.post(
        f"{hub.url}/api/jobs",
        json={"spec": spec},
        headers={"authorization": f"Bearer {hub.operator_token}"},
        trust_env=False,
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["job"])


def one_round(member: Peer, number: int) -> None:
    plan = member.request(RoundJoin(number, base="b"))
    assert isinstance(plan, RoundPlan)
    verdict = member.request(RoundVote(number, plan.epoch, ok=True, digest="d"))
    assert isinstance(verdict, Verdict)
    assert verdict.committed


def measured(member: Peer, seq: int, step: int, loss: float) -> None:
    values = {"loss": loss, "tokens_per_s": 1234.0, "held_out_loss": loss + 0.5}
    member.request(Metrics("i1", seq, [Point(1.0, step, step // 10, values)]))


def test_what_happens_is_seen_live_and_nobody_else_is_asked(
    browser: Browser, hub: HubServer
) -> None:
    if plotly_script() is None:
        pytest.skip("plotly is not installed")
    with watched(browser, hub) as seen, contextlib.ExitStack() as sessions:
        page = seen.page
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#no-nodes")).to_be_visible()

        node = sessions.enter_context(Peer(hub, "kitchen-1", info=INFO))
        row = page.locator("#nodes tbody tr")
        expect(row).to_contain_text("kitchen-1")
        expect(row).to_contain_text("online")
        expect(row).to_contain_text("16.0 GB")

        job = submit(hub)
        expect(page.locator("#job-title")).to_have_text(job)
        member = sessions.enter_context(Peer(hub, f"{job}/w0"))
        member.request(Register())
        measured(member, 1, 10, 3.25)
        chart = page.locator("#loss-chart")
        expect(chart).to_have_attribute("aria-label", re.compile("w0 3.250"))
        expect(page.locator("#members tbody tr")).to_contain_text("3.250")
        one_round(member, 0)
        expect(page.locator("#rounds tbody tr")).to_contain_text("committed")

        measured(member, 2, 50, 2.125)
        expect(chart).to_have_attribute("aria-label", re.compile("w0 2.125"))
        expect(chart).to_have_attribute("aria-label", re.compile("held-out 2.625"))
        expect(page.locator("#progress-text")).to_contain_text("step 50 of 100")
        drawn = "document.querySelector('#loss-chart').data.map(t => t.x.length)"
        assert page.evaluate(drawn) == [2, 2]

        node.request(LogLines(job, "w0", 1, ["<b>not markup</b>", "second line"]))
        expect(page.locator("#log div")).to_have_count(2)
        expect(page.locator("#log")).to_contain_text("<b>not markup</b>")
        member.request(Event("checkpoint", "checkpoint of round 1"))
        expect(page.locator("#events li").first).to_contain_text("checkpoint of round 1")

        assert seen.problems == []
        assert seen.hosts == {f"127.0.0.1:{hub.port}"}


def test_the_page_comes_back_by_itself_and_doubles_nothing(
    browser: Browser, hub: HubServer
) -> None:
    with watched(browser, hub) as seen, Peer(hub, "kitchen-1", info=INFO) as node:
        job, page = submit(hub), seen.page
        node.request(LogLines(job, "w0", 1, ["one"]))
        expect(page.locator("#log div")).to_have_count(1)
        page.context.set_offline(True)
        node.request(LogLines(job, "w0", 2, ["two"]))
        page.evaluate("window.dispatchEvent(new Event('hashchange'))")
        page.context.set_offline(False)
        node.request(LogLines(job, "w0", 3, ["three"]))
        expect(page.locator("#log div")).to_have_text(["w0one", "w0two", "w0three"])


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (800, "light"), (1600, "dark")])
def test_nothing_sticks_out_at_any_width(
    browser: Browser, hub: HubServer, width: int, scheme: str
) -> None:
    with (
        watched(browser, hub, width=width, scheme=scheme) as seen,
        Peer(hub, "kitchen-1", info=INFO) as node,
    ):
        job, page = submit(hub), seen.page
        node.request(LogLines(job, "w0", 1, ["x" * 4000]))
        expect(page.locator("#log div")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(16, 20, 23)" if scheme == "dark" else "rgb(246, 247, 248)")


def test_charts_follow_the_width_of_the_window(browser: Browser, hub: HubServer) -> None:
    if plotly_script() is None:
        pytest.skip("plotly is not installed")
    with watched(browser, hub) as seen, Peer(hub, "kitchen-1", info=INFO):
        job, page = submit(hub), seen.page
        with Peer(hub, f"{job}/w0") as member:
            member.request(Register())
            measured(member, 1, 10, 3.0)
            svg = page.locator("#loss-chart .main-svg").first
            expect(svg).to_be_visible()
            widths = "[svg.clientWidth, svg.closest('.chart').clientWidth]"
            find = (
                f"(() => {{ const svg = document.querySelector('.main-svg'); return {widths} }})()"
            )
            before = page.evaluate(find)[1]
            page.set_viewport_size({"width": 700, "height": 900})
            deadline = time.monotonic() + WAIT_MS / 1000
            own, room = before, before
            while (room == before or abs(own - room) > 1) and time.monotonic() < deadline:
                page.wait_for_timeout(20)
                own, room = page.evaluate(find)
            assert room != before
            assert abs(own - room) <= 1


def test_jobs_are_chosen_with_the_keyboard(browser: Browser, hub: HubServer) -> None:
    first, second = submit(hub, name="first", nodes=5), submit(hub, name="second", nodes=5)
    with watched(browser, hub) as seen:
        page = seen.page
        expect(page.locator("#job-title")).to_have_text(second)
        page.locator("#jobs button").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#job-title")).to_have_text(first)
        expect(page.locator("#jobs button[aria-current=true]")).to_contain_text(first)
        page.reload()
        expect(page.locator("#job-title")).to_have_text(first)


def test_a_job_is_stopped_from_the_page(browser: Browser, hub: HubServer) -> None:
    submit(hub, nodes=5)
    with watched(browser, hub) as seen:
        page = seen.page
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#job-state")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert seen.problems == []


def test_without_plotly_everything_but_the_charts_works(
    browser: Browser, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.pages.plotly_script", lambda: None)
    job = submit(hub)
    with watched(browser, hub) as seen:
        expect(seen.page.locator("#no-plotly")).to_be_visible()
        expect(seen.page.locator("#charts")).to_be_hidden()
        expect(seen.page.locator("#job-title")).to_have_text(job)


def test_a_wrong_token_gets_the_form_and_a_right_one_the_page(
    browser: Browser, hub: HubServer
) -> None:
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(f"{hub.url}/?token=wrong")
        expect(page.get_by_role("alert")).to_contain_text("opens nothing here")
        page.get_by_label("Operator token").fill(hub.operator_token)
        page.get_by_role("button").click()
        expect(page.locator("#connection")).to_have_text("live")
        assert "token" not in page.url
