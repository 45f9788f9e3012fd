"""What every view shows, live, from a real hub with real sessions."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.wire.messages import Event
from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene

CLEAN: list[str] = []


def test_the_fleet_shows_each_machine_as_it_is(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.go("fleet")
        row = page.locator("tbody tr", has_text="jonas-laptop")
        expect(row).to_contain_text("paused")
        expect(row).to_contain_text("on battery")
        expect(row).to_contain_text("0.0.9 ≠ hub")
        expect(row).to_contain_text("17 %")
        expect(row).to_contain_text("6.0 / 30 Mbit/s")
        expect(page.locator("tbody tr", has_text="attic-gpu")).to_contain_text("96 %")
        mark = page.locator(".map a[data-node=maria-laptop]")
        expect(mark).to_have_attribute("aria-label", "maria-laptop: is free, 38 ms, 60 Mbit/s")
        expect(page.locator(".map a[data-node=jonas-laptop]")).to_have_class("node paused")
        fast = page.locator(".links line").nth(0).get_attribute("stroke-width")
        slow = page.locator(".links line").nth(1).get_attribute("stroke-width")
        assert fast is not None
        assert slow is not None
        assert float(fast) > float(slow) > 1  # attic-gpu and jonas-laptop, in the order of names

        mark.click()
        expect(page.locator("#node-title")).to_have_text("maria-laptop")
        panel = page.locator(".node-panel")
        expect(panel).to_contain_text("at most 6 of 12 cores")
        expect(panel).to_contain_text("trainer, container")
        assert page.url.endswith("#/fleet/maria-laptop")

        scene.nodes["kitchen-1"].cut()
        expect(page.locator("tbody tr", has_text="kitchen-1")).to_contain_text("lost")
        expect(page.locator(".map a[data-node=kitchen-1]")).to_have_class("node lost")
        assert seen.problems == CLEAN


@pytest.mark.long(
    "tests/hub/observability/test_history.py"
    "::test_nodes_are_sampled_and_their_number_bounds_the_cost"
)
def test_the_past_of_a_node_is_drawn_from_the_history(scene: Scene, watched: Watch) -> None:
    assert scene.hub.hub is not None
    history, now = scene.hub.hub.stores.history, scene.hub.hub.clock.wall()
    for minute in range(30):
        history.note("node/attic-gpu", now - 60 * minute, {"cpu_percent": 40.0 + minute})
    scene.hub.call(history.flush())
    with watched() as seen:
        page = seen.go("fleet/attic-gpu")
        chart = page.locator("#node-chart")
        expect(chart).to_have_attribute("aria-label", re.compile("Processors: last values"))
        drawn = "document.querySelector('#node-chart').data.at(-1).x.length"
        assert page.evaluate(drawn) >= 30
        page.locator("#node-figure").select_option("latency_ms")
        expect(chart).to_have_attribute("aria-label", re.compile("Latency: "))
        assert seen.problems == CLEAN


@pytest.mark.long("tests/dashboard/test_views.py::test_the_fleet_shows_each_machine_as_it_is")
def test_a_node_names_its_device_and_an_idle_one(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.go("fleet/attic-gpu")
        panel = page.locator(".node-panel")
        expect(panel).to_contain_text("GeForce RTX 3090 (24 GB)")
        expect(panel).to_contain_text("96 %, 9.0 GB in use")
        expect(page.locator("#node-idle")).to_have_count(0)
        page = seen.go("fleet/kitchen-1")
        expect(page.locator("#node-idle")).to_have_text(
            "GeForce RTX 3060 is idle: torch 2.13.0+cpu is built without support for it; "
            "pip install torch for CUDA"
        )
        expect(panel).to_contain_text("Computes on")
        expect(panel).to_contain_text("processor")
        assert seen.problems == CLEAN


def test_a_job_is_followed_live_in_all_its_parts(scene: Scene, watched: Watch) -> None:
    job = scene.submit("shakespeare")
    members = scene.train(job, steps=100, rounds=3)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator("#job-title")).to_have_text(job)
        chart = page.locator("#loss-chart")
        expect(chart).to_have_attribute(
            "aria-label", re.compile("held-out .*attic-gpu .*kitchen-1 ")
        )
        expect(page.locator(".tiles")).to_contain_text("Round3")
        expect(page.locator("figure:has(#loss-chart) figcaption")).to_contain_text("nats per token")
        before = page.evaluate("document.querySelector('#loss-chart').data[1].x.length")
        assert before == 10
        scene.measure(members[0], 110)
        page.wait_for_function(
            "n => document.querySelector('#loss-chart').data[1].x.length > n", arg=before
        )
        members[0].request(Event("member-slow", "w0 became slow"))
        node = scene.view(job)["members"][0]["node"]  # people know it by its machine
        expect(page.locator(".events li").first).to_have_text(re.compile(f"{node} became slow"))
        page.wait_for_function(
            "() => document.querySelector('#loss-chart').marks.some("
            "({ text }) => text.includes('became slow'))"
        )

        seen.go(f"jobs/{job}/timeline")
        rounds = page.locator("table", has_text="Verdict").locator("tbody tr")
        expect(rounds).to_have_count(3)
        scene.round(members, 3)
        expect(rounds).to_have_count(4)
        page.locator("#gantt").focus()
        page.keyboard.press("ArrowLeft")
        told = page.locator(".note-line")
        expect(told).to_contain_text("Round 3, committed")
        expect(told).to_contain_text("kitchen-1 ")
        page.keyboard.press("ArrowLeft")
        expect(told).to_contain_text(re.compile("Round 2, committed.*apply"))
        page.keyboard.press("+")
        expect(page.locator("#round-count")).to_have_value("5")

        seen.go(f"jobs/{job}/members")
        expect(page.locator("tbody tr", has_text="kitchen-1")).to_contain_text("running")
        seen.go(f"jobs/{job}/files")
        expect(page.locator("pre.output")).to_contain_text('name = "shakespeare"')
        link = page.get_by_role("link", name="metrics.jsonl")
        with page.expect_download() as download:
            link.click()
        assert '"step": 10' in download.value.path().read_text().replace('"step":10', '"step": 10')
        assert seen.problems == CLEAN
        assert seen.hosts == {f"127.0.0.1:{scene.hub.port}"}


@pytest.mark.long("tests/dashboard/test_views.py::test_a_job_is_followed_live_in_all_its_parts")
def test_a_metric_that_the_hub_never_saw_can_be_drawn(scene: Scene, watched: Watch) -> None:
    job = scene.submit("own-metric")
    members = scene.train(job, steps=20, rounds=1)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        for step in (30, 40):
            scene.measure(members[0], step, held_out=False, **{"my/temperature": step / 10})
        page.get_by_label("Metric to draw").select_option("my/temperature")
        chart = page.locator("#metric-chart")
        expect(chart).to_have_attribute("aria-label", re.compile("my/temperature: .*attic-gpu 4"))
        assert seen.problems == CLEAN


def test_what_each_node_is_worth_is_said(scene: Scene, watched: Watch) -> None:
    job = scene.submit("worth")
    scene.train(job, steps=20, rounds=8)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.locator(".worth")).to_contain_text("2 machines")
        rows = page.locator("table", has_text="Advice").locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("attic-gpu")
        told = scene.http.get(f"/api/jobs/{job}/worth").json()
        expect(rows.first.locator(".pill")).to_have_text(told["nodes"][0]["advice"])
        assert seen.problems == CLEAN


def test_output_is_followed_and_searched_at_the_hub(scene: Scene, watched: Watch) -> None:
    job = scene.submit("talks", nodes=1)
    (member,) = scene.view(job)["members"]
    lines = [f"step {n} loss {n / 7:.2f}" for n in range(1500)]
    for part in (lines[:900], lines[900:]):  # a message holds 1,000 at most
        scene.say(job, *part, node=member["node"])
    scene.say(job, "<b>100% not markup</b>", node=member["node"])
    with watched() as seen:
        page = seen.go(f"jobs/{job}/output")
        log = page.locator("#log")
        expect(log).to_contain_text("<b>100% not markup</b>")
        assert page.locator("#log div").count() <= 201  # it begins with the last few
        scene.say(job, "something new", node=member["node"])
        expect(log.locator("div").last).to_have_text("something new")
        page.keyboard.press("/")
        page.keyboard.type("STEP 77 ")
        expect(log.locator("div")).to_have_text(["step 77 loss 11.00"])
        expect(log.locator("mark")).to_have_text("step 77 ")
        page.locator("#log-search").fill("0% n")
        expect(log.locator("div")).to_have_text(["<b>100% not markup</b>"])
        page.locator("#log-search").fill("")
        expect(log.locator("div").last).to_have_text("something new")
        assert seen.problems == CLEAN


@pytest.mark.long(
    "tests/dashboard/test_compare_returns.py::test_returns_of_a_policy_in_several_jobs_overlay"
)
def test_jobs_are_filtered_and_compared(scene: Scene, watched: Watch) -> None:
    first, second = scene.submit("wide", batch="sweep"), scene.submit("narrow", nodes=1)
    third = scene.submit("other", nodes=40, least=40)
    scene.train(first, steps=60, rounds=0)
    scene.train(second, steps=120, rounds=0)
    scene.http.post(f"/api/jobs/{third}/stop", json={})
    few = scene.submit("few", nodes=40, batch="few")
    placed = len(scene.placed(few))
    scene.http.post(f"/api/jobs/{few}/stop", json={"grace_s": 0})
    with watched() as seen:
        page = seen.go("jobs")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(4)
        ended = rows.filter(has_text=few).filter(has_text="stopped")
        expect(ended.locator("td[data-name=Nodes]")).to_have_text(str(placed))
        expect(page.locator("thead")).to_contain_text("Submitted")
        scene.http.delete(f"/api/jobs/{few}")
        expect(rows).to_have_count(3)
        page.locator("#job-batch").select_option("sweep")
        expect(rows).to_have_count(1)
        page.locator("#job-batch").select_option("")
        page.locator("#job-state").select_option("stopped")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text(third)
        page.locator("#job-state").select_option("all")
        page.locator("#job-search").fill("arro")
        expect(rows).to_have_count(1)
        page.locator("#job-search").fill("")
        page.get_by_label(f"Compare {first}").check()
        page.get_by_label(f"Compare {second}").check()
        page.get_by_role("link", name="Compare 2").click()
        chart = page.locator("#compare-loss")
        expect(chart).to_have_attribute("aria-label", re.compile(f"{first} .*{second} "))
        last = "document.querySelector('#compare-loss').data.map(t => Math.max(...t.x))"
        assert sorted(page.evaluate(last)) == [60, 120]
        held_out = page.locator("figure:has(#compare-held-out) figcaption")
        expect(held_out).to_have_text("Held-out loss nats per token")
        page.locator("#compare-axis").select_option("tokens")
        page.wait_for_function(f"() => Math.max(...{last}) > 1000")
        assert sorted(page.evaluate(last)) == [512 * 120, 2 * 512 * 60]
        figures = page.locator("section[aria-labelledby=figures-title] tbody tr")
        expect(figures).to_have_count(2)
        expect(page.locator("#ranking")).to_contain_text("Ranking by held-out loss: 1.")
        expect(figures.locator(".best").first).to_be_visible()
        differs = page.locator(".differs tbody tr")  # and nothing else of thirty settings
        expect(differs).to_contain_text(["[job] nodes"])
        assert seen.problems == CLEAN


def test_queues_and_what_happened_are_shown_live(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.go("queues")
        scene.http.post(
            "/api/queues/put", json={"queue": "experience", "key": "a", "payload": "aGVsbG8="}
        )
        row = page.locator("tbody tr", has_text="experience")
        expect(row).to_contain_text("1")
        scene.submit("orders", nodes=1)
        page.locator("#own-queues").check()
        expect(page.locator("tbody tr", has_text="node/attic-gpu")).to_be_visible()
        page.locator("#own-queues").uncheck()
        expect(page.locator("tbody tr", has_text="node/attic-gpu")).to_be_hidden()
        seen.go("events/happened")
        scene.submit("news", nodes=1)
        expect(page.locator(".events li").first).to_be_visible()
        expect(page.locator(".events")).to_contain_text("submitted for 1 node")
        seen.go("events")
        alarm = page.locator("tbody tr", has_text="version mismatch")
        expect(alarm).to_contain_text("jonas-laptop")
        expect(page.locator("#alarm-count")).to_have_text(re.compile("[1-9]"))
        seen.go("events/audit")
        started = page.locator("tbody tr", has_text="operator started news-")
        expect(started).to_be_visible()
        assert seen.problems == CLEAN


def test_the_page_comes_back_by_itself_and_doubles_nothing(scene: Scene, watched: Watch) -> None:
    job = scene.submit("back", nodes=1)
    (member,) = scene.view(job)["members"]
    with watched() as seen:
        page = seen.go(f"jobs/{job}/output")
        scene.say(job, "one", node=member["node"])
        expect(page.locator("#log div")).to_have_count(1)
        page.context.set_offline(True)
        scene.say(job, "two", node=member["node"])
        page.wait_for_timeout(300)
        page.context.set_offline(False)
        scene.say(job, "three", node=member["node"])
        expect(page.locator("#log div")).to_have_text(["one", "two", "three"])


@pytest.mark.long(
    "tests/proxy/test_nginx.py::test_the_page_and_its_live_stream_work_below_the_prefix"
)
def test_a_hub_below_a_path_is_asked_only_there(browser: Browser, tmp_path: Path) -> None:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, prefix="/atoll"
    )
    with HubServer(options) as hub, contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        paths: set[str] = set()
        page.on("request", lambda request: paths.add(httpx.URL(request.url).path))
        page.goto(f"{hub.url}/atoll/?token={hub.operator_token}")
        expect(page.locator("#connection")).to_have_text("live")
        page.evaluate("() => { location.hash = '#/fleet/nobody' }")
        expect(page.locator("#node-chart svg.plot")).to_be_attached()
        assert "/atoll/static/lib/charts.js" in paths
        assert all(path.startswith("/atoll/") for path in paths), paths


def test_a_login_that_ends_leads_to_the_form(scene: Scene, watched: Watch) -> None:
    with watched(token=scene.token("viewer")) as seen:
        tickets = scene.http.get("/api/tickets").json()
        (ticket,) = [t for t in tickets if t["role"] == "viewer"]
        scene.http.post(f"/api/tickets/{ticket['id']}/revoke", json={})
        seen.page.evaluate("() => { location.hash = '#/jobs/none' }")  # it opens another stream
        expect(seen.page.get_by_label("Operator token")).to_be_visible()


def test_a_plan_says_what_is_best_and_why(scene: Scene, watched: Watch) -> None:
    job = scene.submit("planned")
    with watched(width=390) as seen:
        page = seen.go(f"plan/{job}")
        expect(page.locator("#plan-job")).to_have_value(job)
        page.locator("#plan-ask").click()
        why = page.locator("#plan-why")
        expect(why).to_contain_text("times the progress of attic-gpu alone")
        expect(why).to_contain_text("estimated from 300 GFLOP/s")
        expect(page.locator("#plan-choice")).to_contain_text("attic-gpu")
        expect(page.locator("#plan-toml")).to_contain_text("[strategy]")
        assert page.locator("#plan-answer tbody tr").count() > 3
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        seen.keep("plan-390")

        page.locator("#plan-job").select_option("")  # a job file in place of a job
        page.locator("#plan-file").fill("[train]\nstep = 3\n")
        page.locator("#plan-ask").click()
        expect(page.locator("#plan-problem")).to_contain_text("did you mean 'steps'?")
        expect(page.locator("#plan-answer")).to_be_hidden()
        for node in scene.nodes.values():
            node.cut()
        expect(page.locator("#plan-offline")).to_contain_text("atoll join")
        expect(page.locator("#plan-ask")).to_be_disabled()
        seen.problems = [problem for problem in seen.problems if "400" not in problem]
        assert seen.problems == CLEAN
