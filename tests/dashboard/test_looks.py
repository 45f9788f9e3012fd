"""Colours, keys and widths of the page; `test_pages.py` looks at every page."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene

GROUND = {"light": "rgb(244, 246, 247)", "dark": "rgb(15, 19, 22)"}


def test_the_colours_can_be_chosen_and_stay(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.page
        ground = "getComputedStyle(document.body).backgroundColor"
        switch = page.locator("#theme")
        for scheme in ("light", "dark"):
            switch.click()
            assert page.evaluate(ground) == GROUND[scheme]
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        assert page.evaluate(ground) == GROUND["dark"]
        switch.click()
        assert page.evaluate(ground) == GROUND["light"]


def test_the_whole_page_is_walked_by_keyboard_alone(scene: Scene, watched: Watch) -> None:
    first, second = scene.submit("first", nodes=1), scene.submit("second", nodes=1)
    with watched() as seen:
        page, press = seen.page, seen.page.keyboard.press
        focused = "document.activeElement.textContent.trim()"
        press("Tab")
        assert page.evaluate(focused) == "Skip to the content"
        press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        press("g")
        press("j")
        expect(page.locator("#jobs-title")).to_be_visible()
        page.locator("#views a").first.focus()
        press("ArrowRight")
        assert page.evaluate(focused) == "Jobs"
        while page.evaluate(focused) != second:
            press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        press("ArrowDown")
        assert page.evaluate(focused) == first
        press("Enter")
        expect(page.locator("#job-title")).to_have_text(first)
        press("?")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("move through a list")
        press("Escape")
        expect(dialog).to_be_hidden()
        press("g")
        press("f")
        page.locator(".map a[tabindex='0']").focus()
        before = page.evaluate("document.activeElement.dataset.node")
        press("ArrowRight")
        after = page.evaluate("document.activeElement.dataset.node")
        assert before != after
        press("Enter")
        expect(page.locator("#node-title")).to_have_text(after)
        page.get_by_role("button", name="Drain", exact=True).focus()
        press("Enter")
        expect(dialog).to_be_visible()
        press("Escape")
        assert page.evaluate(focused) == "Drain"  # back where one was
        assert seen.problems == []


def test_charts_follow_the_width_of_the_window(scene: Scene, watched: Watch) -> None:
    job = scene.submit("wide", nodes=1)
    scene.train(job, steps=50, rounds=0)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator("#loss-chart")).to_have_attribute(
            "aria-label", re.compile("last values")
        )
        sizes = (
            "(() => { const svg = document.querySelector('#loss-chart svg.plot');"
            " return [svg.clientWidth, svg.closest('.chart').clientWidth] })()"
        )
        before = page.evaluate(sizes)[1]
        page.set_viewport_size({"width": 700, "height": 900})
        page.wait_for_function(
            f"was => {{ const [own, room] = {sizes};"
            " return room !== was && Math.abs(own - room) <= 1 }",
            arg=before,
        )
