"""Jobs of policies side by side: one chart per policy, and what critics of their own lose."""

from __future__ import annotations

import re
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from atoll.wire.messages import Metrics, Point
from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.learning import Learning
from tests.dashboard.scene import Scene


@pytest.mark.parametrize(("width", "scheme"), [(1360, "dark"), (360, "light")])
@pytest.mark.every(2)
def test_returns_of_a_policy_in_several_jobs_overlay(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    first, second = Learning(scene), Learning(scene)
    first.measure(40_000)
    second.measure(24_000)
    with watched(width=width, scheme=scheme) as seen:
        page = seen.go(f"compare?jobs={first.job},{second.job}")
        for place, policy in enumerate(("earth", "moon")):
            chart = page.locator(f"#compare-return-{place}")
            both = re.compile(f"Return of {policy}: last values {first.job} .*{second.job}")
            expect(chart).to_have_attribute("aria-label", both)
        expect(page.locator("#compare-loss")).to_be_hidden()  # there is no loss to compare
        ends = "document.querySelector('#compare-return-0').data.map(t => t.x.at(-1))"
        page.wait_for_function("() => document.querySelector('#compare-return-0').data")
        assert page.evaluate(ends) == [40_000, 24_000]
        figures = page.get_by_role("region", name="Figures").locator("tbody")
        expect(figures).to_contain_text(re.compile(r"earth \d+.*, moon \d+"))
        first.measure(50_000)
        page.wait_for_function(f"() => {ends}[0] === 50000")
        page.locator("#compare-axis").select_option("time")
        page.wait_for_function(f"() => {ends}[0] < 1000")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"compare-returns-{scheme}-{width}")
        found = Axe().run(page).response["violations"]
        assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
        assert seen.problems == []


def test_mixed_jobs_compare_losses_and_returns(scene: Scene, watched: Watch) -> None:
    learning = Learning(scene)
    learning.measure(10_000)
    text = scene.submit("text", nodes=1)
    scene.train(text, steps=40, rounds=0)
    with watched() as seen:
        page = seen.go(f"compare?jobs={learning.job},{text}")
        expect(page.locator("#compare-loss")).to_be_visible()
        expect(page.locator("#compare-return-0")).to_be_visible()
        assert seen.problems == []


@pytest.mark.long(
    "tests/dashboard/test_compare_returns.py::test_pooled_critic_shows_loss_per_policy"
)
def test_policies_with_own_critics_have_loss_curves(scene: Scene, watched: Watch) -> None:
    """Without a critic for all of them, each actor tells of the loss of its own values."""
    answer = scene.http.post("/api/jobs", json={"spec": '[job]\nname = "own"\n' + OWN})
    assert answer.status_code == 201, answer.text
    job = str(answer.json()["job"])
    actors = scene.start(job)
    for step in (1000, 2000, 3000):
        for actor in actors:
            scene.measure(actor, step, env_steps=float(step), value_loss=1e3 / step)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator("#critic-chart")).to_have_attribute(
            "aria-label", re.compile("earth .*moon")
        )
        drawn = "document.querySelector('#critic-chart').data.map(t => t.y.length)"
        page.wait_for_function("() => document.querySelector('#critic-chart').data")
        assert page.evaluate(drawn) == [3, 3]
        assert seen.problems == []


def test_pooled_critic_shows_loss_per_policy(scene: Scene, watched: Watch) -> None:
    """Its own policy goes by its short name; a policy of another job is named with that job."""
    answer = scene.http.post("/api/jobs", json={"spec": POOL})
    assert answer.status_code == 201, answer.text
    job = str(answer.json()["job"])
    critic, _ = scene.start(job)
    for seq, step in enumerate((10, 20), 1):
        told = {f"value_loss.{job}.earth": 1.0 / step, "value_loss.other-1.mars": 2.0 / step}
        critic.request(Metrics("i1", seq, [Point(time.time(), step, 0, told)]))
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator("#critic-chart")).to_have_attribute(
            "aria-label", re.compile(r"values earth 0\.\d+, other-1\.mars 0\.\d+")
        )
        assert seen.problems == []


POOL = """
[job]
name = "pooled"
[rl]
pool = "pool/balance"
steps = 60000
[[rl.policies]]
name = "earth"
env = "atoll.rl.environments.physics:cartpole"
"""

OWN = """
[rl]
critic = "own"
steps = 60000
[[rl.policies]]
name = "earth"
env = "atoll.rl.environments.physics:cartpole"
[[rl.policies]]
name = "moon"
env = "atoll.rl.environments.physics:cartpole"
"""
