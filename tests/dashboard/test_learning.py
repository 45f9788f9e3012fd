"""A job of policies as the page shows it: returns, critic and episodes, live."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.learning import Learning
from tests.dashboard.scene import Scene

CLEAN: list[str] = []


def test_policies_are_followed_live_to_their_episodes(scene: Scene, watched: Watch) -> None:
    learning = Learning(scene)
    learning.measure(20_000)
    with watched() as seen:
        page = seen.go(f"jobs/{learning.job}")
        chart = page.locator("#return-chart")
        expect(chart).to_have_attribute("aria-label", re.compile(r"earth \d+.* moon \d+"))
        expect(page.locator(".charts figure")).to_have_count(4)
        expect(page.locator("#critic-chart")).to_have_attribute(
            "aria-label", re.compile("earth .*moon")
        )
        moon = page.get_by_role("region", name="Policies").locator("tbody tr", has_text="moon")
        expect(moon).to_contain_text("cartpole")
        expect(moon).to_contain_text("20.0k of 60.0k")
        expect(moon).to_contain_text("v200")
        expect(moon.locator("svg polyline")).to_have_count(1)
        critic = page.get_by_role("region", name="Critic").locator("tbody tr")
        expect(critic).to_contain_text("8.4")
        expect(page.locator(".tiles")).to_contain_text(re.compile("earth.*moon.*Criticv200"))
        expect(page.get_by_text("33 % of the steps of all policies")).to_be_visible()
        expect(page.get_by_role("link", name="Timeline")).to_be_hidden()  # there are no rounds

        drawn = "document.querySelector('#return-chart').data.map(t => t.x.at(-1))"
        assert page.evaluate(drawn) == [20_000, 20_000]
        learning.measure(30_000)
        page.wait_for_function(f"() => Math.max(...{drawn}) === 30000")
        expect(moon).to_contain_text("30.0k of 60.0k")
        page.locator("#axis").select_option("time")
        page.wait_for_function(f"() => {drawn}[0] > 1e12")  # milliseconds

        expect(page.locator(".episodes")).to_be_hidden()
        learning.record("moon")
        picture = page.get_by_role("img", name="An episode of moon")
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 150
        expect(page.locator(".events")).to_contain_text("an episode of moon is recorded")
        assert seen.problems == CLEAN
        assert seen.hosts == {f"127.0.0.1:{scene.hub.port}"}


def test_an_actor_that_hears_no_critic_shows_for_how_long(scene: Scene, watched: Watch) -> None:
    learning = Learning(scene)
    learning.measure(5_000)
    learning.scene.measure(learning.actors[0], 6_000, value_version=50.0, value_age_s=42.0)
    with watched() as seen:
        page = seen.go(f"jobs/{learning.job}")
        earth = page.get_by_role("region", name="Policies").locator("tbody tr", has_text="earth")
        expect(earth).to_contain_text("v50, silent 42 s")


@pytest.mark.parametrize(("width", "scheme"), [(1360, "dark"), (360, "light")])
@pytest.mark.every(2)
def test_it_fits_has_its_colours_and_no_barrier(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    learning = Learning(scene, moon="Pendulum-v1")
    learning.measure(40_000)
    learning.record("earth")
    learning.record("moon")
    with watched(width=width, scheme=scheme) as seen:
        page = seen.go(f"jobs/{learning.job}")
        # Returns of different things have a scale each.
        for place, policy in enumerate(("earth", "moon")):
            chart = page.locator(f"#return-chart-{place}")
            expect(chart).to_have_attribute(
                "aria-label", re.compile(f"of {policy}: last .*{policy}")
            )
            expect(chart.locator("svg.plot").first).to_be_visible()
        expect(page.locator(".episodes img")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"learning-{scheme}-{width}")
        found = Axe().run(page).response["violations"]
        serious = [v["id"] for v in found if v["impact"] in ("serious", "critical")]
        assert serious == []
        assert seen.problems == CLEAN
