"""How a job's page opens: what it says before the first step, and how soon it draws."""

from __future__ import annotations

import re
import time

from playwright.sync_api import expect

from atoll.wire.messages import Metrics, Point, ProcessState
from atoll.wire.states import ProcessPhase
from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene
from tests.e2e.conftest import until


def test_a_starting_job_says_what_it_waits_for(scene: Scene, watched: Watch) -> None:
    job = scene.submit("new", nodes=2)
    first, second = scene.placed(job)
    with watched() as seen:
        said = seen.go(f"jobs/{job}").locator("#job-sentence")
        expect(said).to_have_text(
            re.compile(r"^GPT, diloco, 2 nodes\. Waiting for .* to start: its machine has not")
        )
        for member in (first, second):
            report = ProcessState(job, member["member"], ProcessPhase.STARTING)
            scene.nodes[member["node"]].request(report)
        expect(said).to_contain_text("to start: loading torch, the model and the data.")
        expect(said).not_to_contain_text("Healthy")
        scene.start(job)
        expect(said).to_have_text("GPT, diloco, 2 nodes. No step is done yet.")


def test_curves_are_drawn_before_the_stream_begins(scene: Scene, watched: Watch) -> None:
    job, other = scene.submit("seen", nodes=2), scene.submit("other", nodes=1)
    scene.train(job, steps=100, rounds=0)
    read = {"job": job, "points": "500"}
    until(lambda: len(scene.http.get("/api/history", params=read).json()["points"]) >= 20)
    with watched() as seen:
        page = seen.page
        page.route(re.compile("api/stream"), lambda route: None)  # which never answers
        seen.go(f"jobs/{job}")
        expect(page.locator("#loss-chart .curve.bold")).to_be_attached()
        expect(page.locator("#job-sentence")).to_contain_text("GPT, diloco, 2 nodes.")
        seen.go(f"jobs/{other}")
        expect(page.locator("#job-sentence")).to_contain_text("1 node.")  # not those of the first
        assert page.locator(".chart:visible").count() == 0


def test_only_charts_with_values_are_shown(scene: Scene, watched: Watch) -> None:
    job = scene.submit("own", nodes=1)
    (member,) = scene.start(job)
    member.request(Metrics("i0", 1, [Point(time.time(), 10, 1, {"score": 0.5})]))
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator("#metric-chart .curve")).to_be_attached()
        expect(page.locator("#loss-chart")).to_be_hidden()
        scene.measure(member, 20)
        expect(page.locator("#loss-chart")).to_be_visible()


MEAN = """
async ([x, y]) => {
  const { meanOf } = await import('./static/lib/plot.js');
  return meanOf(x.map((one, at) => ({ x: one, y: y[at] })));
}
"""


def test_a_mean_does_not_jump_from_member_to_member(scene: Scene, watched: Watch) -> None:
    fast, slow = list(range(0, 1000, 40)), list(range(20, 1000, 40))
    with watched() as seen:
        both = [[fast, slow], [[3.0] * len(fast), [1.0] * len(slow)]]
        mean = seen.page.evaluate(MEAN, both)
        assert mean["x"] == sorted(fast + slow)
        assert mean["y"] == [3.0, *[2.0] * (len(fast) + len(slow) - 1)]  # the slow one begins later
        early, late = [0, 100, 200], [0, 100, 200, 900, 1000]
        gone = seen.page.evaluate(MEAN, [[early, late], [[4.0] * 3, [2.0] * 5]])
        assert gone["y"] == [3.0, 3.0, 3.0, 2.0, 2.0]  # who went away counts no longer
