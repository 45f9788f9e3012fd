"""Widths, colours, keys and what assistive technology makes of the page; pictures are kept."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.scene import Scene

GROUND = {"light": "rgb(244, 246, 247)", "dark": "rgb(15, 19, 22)"}


def furnished(scene: Scene) -> dict[str, str]:
    """Fill the hub; return the address of every view by a name for its picture."""
    job = scene.submit("shakespeare")
    scene.train(job, steps=150, rounds=3)
    member = scene.view(job)["members"][0]
    scene.say(job, "epoch 1", "x" * 3000, node=member["node"], member=member["member"])
    scene.submit("needs-forty", nodes=40, least=40)
    scene.http.post("/api/queues/put", json={"queue": "work", "key": "a", "payload": "aGk="})
    return {
        "fleet": "fleet", "node": "fleet/maria-laptop", "jobs": "jobs", "job": f"jobs/{job}",
        "timeline": f"jobs/{job}/timeline", "members": f"jobs/{job}/members",
        "output": f"jobs/{job}/output", "files": f"jobs/{job}/files",
        "compare": f"compare?jobs={job}", "queues": "queues", "queue": "queues/work",
        "alarms": "events", "events": "events/happened", "limits": "events/limits",
        "audit": "events/audit",
    }  # fmt: skip


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (360, "dark")])
def test_every_view_fits_has_its_colours_and_no_barrier(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    places = furnished(scene)
    axe = Axe()
    barriers: list[str] = []
    with watched(width=width, scheme=scheme) as seen:
        page = seen.page
        for name, place in places.items():
            seen.go(place)
            expect(page.locator("main h2:visible").first).to_be_visible()
            if page.locator(".chart").count():
                expect(page.locator(".chart .main-svg").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == GROUND[scheme]
            seen.keep(f"{name}-{scheme}-{width}")
            if width < 400:
                continue  # the same elements in the same colours
            found = axe.run(page).response["violations"]
            barriers += [
                f"{name}: {v['id']}: {v['help']}: {v['nodes'][0]['html'][:200]}"
                for v in found
                if v["impact"] in ("serious", "critical")
            ]
        assert barriers == []
        assert seen.problems == []


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
        expect(page.locator("#loss-chart")).to_have_attribute("aria-label", re.compile("w0"))
        sizes = (
            "(() => { const svg = document.querySelector('#loss-chart .main-svg');"
            " return [svg.clientWidth, svg.closest('.chart').clientWidth] })()"
        )
        before = page.evaluate(sizes)[1]
        page.set_viewport_size({"width": 700, "height": 900})
        page.wait_for_function(
            f"was => {{ const [own, room] = {sizes};"
            " return room !== was && Math.abs(own - room) <= 1 }",
            arg=before,
        )
