"""What operators do from the page, each after a question; viewers only look."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from atoll.hub.server import HubServer
from atoll.wire.messages import Drain
from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene
from tests.patience import PATIENCE_S


def answer(page: Page, verb: str, **fields: str) -> None:
    """Fill the open question and say yes."""
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for name, value in fields.items():
        dialog.locator(f"[name={name}]").fill(value)
    dialog.get_by_role("button", name=verb, exact=True).click()
    expect(dialog).to_be_hidden()


def test_a_node_is_drained_undrained_and_evicted(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.go("fleet/attic-gpu")
        panel = page.locator(".node-panel")
        panel.get_by_role("button", name="Drain", exact=True).click()
        page.keyboard.press("Escape")  # thinking better of it changes nothing
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(panel.locator(".pill").first).to_have_text("online")
        panel.get_by_role("button", name="Drain", exact=True).click()
        answer(page, "Drain", reason="new fan")
        seen.told("attic-gpu drains")
        told = scene.nodes["attic-gpu"]
        wish = told.notice(Drain)
        assert (wish.draining, wish.reason) == (True, "new fan")
        told.request(wish)
        expect(panel.locator(".pill").first).to_have_text("drained")  # it runs nothing
        expect(panel).to_contain_text("new fan")
        panel.get_by_role("button", name="Undrain").click()
        answer(page, "Undrain")
        told.request(told.notice(Drain))
        expect(panel.locator(".pill").first).to_have_text("online")

        panel.get_by_role("button", name="Evict").click()
        with page.expect_response("**/api/nodes/attic-gpu/revoke") as sent:
            answer(page, "Evict")
        assert sent.value.status == 200
        seen.told("attic-gpu is evicted")
        assert seen.problems == []


def test_the_bounds_of_a_running_job_are_changed(scene: Scene, watched: Watch) -> None:
    job = scene.submit("mine", nodes=1)
    scene.train(job, steps=20, rounds=0)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        page.get_by_role("button", name="Nodes…").click()
        answer(page, "Change", min="1", max="3")
        expect(page.locator(".tiles")).to_contain_text("of 3")
        assert (scene.view(job)["min_nodes"], scene.view(job)["nodes_wanted"]) == (1, 3)
        assert seen.problems == []


def test_a_job_is_stopped_and_resumed(scene: Scene, watched: Watch) -> None:
    job = scene.submit("mine", nodes=1)
    scene.train(job, steps=20, rounds=0)
    waiting = scene.submit("never", nodes=40, least=40)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert scene.view(job)["stopping"] is False
        page.get_by_role("button", name="Stop").click()
        answer(page, "Stop")
        state = page.locator("#job-state-now")
        expect(state).to_have_text("stopping")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()

        seen.go(f"jobs/{waiting}")
        expect(page.locator(".reason")).to_contain_text("40")
        page.get_by_role("button", name="Stop").click()
        answer(page, "Stop")
        expect(state).to_have_text("stopped")
        page.get_by_role("button", name="Resume").click()
        answer(page, "Resume")
        expect(state).to_have_text("waiting")
        assert seen.problems == []


def test_dead_letters_are_read_requeued_and_discarded(scene: Scene, watched: Watch) -> None:
    for key in ("a", "b"):
        body = {"queue": "work", "key": key, "payload": "aGVsbG8="}
        assert scene.http.post("/api/queues/put", json=body).status_code == 200
    for _ in range(5):  # given back until nobody gets them any more
        claimed = scene.http.post("/api/queues/claim", json={"queue": "work", "lease_s": 30,
                                                             "limit": 2})  # fmt: skip
        for item in claimed.json()["items"]:
            body = {"queue": "work", "lease": item["lease"], "reason": "cannot be parsed"}
            scene.http.post("/api/queues/release", json=body)
    with watched() as seen:
        page = seen.go("queues")
        page.get_by_role("link", name="work").click()
        letters = page.locator("table", has_text="Payload").locator("tbody tr")
        expect(letters).to_have_count(2)
        expect(letters.first).to_contain_text("hello")
        expect(letters.first).to_contain_text("cannot be parsed")
        letters.first.get_by_role("button", name="Requeue").click()
        answer(page, "Requeue")
        expect(letters).to_have_count(1)
        letters.first.get_by_role("button", name="Discard").click()
        answer(page, "Discard")
        expect(letters).to_have_count(0)
        (row,) = [r for r in scene.http.get("/api/queues").json() if r["queue"] == "work"]
        assert (row["ready"], row["dead"]) == (1, 0)
        assert seen.problems == []


def test_an_alarm_is_silenced(scene: Scene, watched: Watch) -> None:
    with watched() as seen:
        page = seen.go("events")
        alarm = page.locator("tbody tr", has_text="version mismatch")
        alarm.get_by_role("button", name="Silence").click()
        answer(page, "Silence")
        expect(alarm).to_contain_text("silenced")
        (told,) = [
            a for a in scene.http.get("/api/alarms").json() if a["kind"] == "version-mismatch"
        ]
        assert told["silenced"] is True
        assert seen.problems == []


def test_a_refusal_is_shown_in_words(scene: Scene, watched: Watch) -> None:
    job = scene.submit("mine", nodes=1)
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        page.get_by_role("button", name="Nodes…").click()
        answer(page, "Change", min="3", max="2")
        seen.told("^toast bad: ")
        assert "Failed to load" in "".join(seen.problems)  # the browser's own line about a 4xx


def test_a_viewer_sees_everything_and_no_button_that_acts(scene: Scene, watched: Watch) -> None:
    job = scene.submit("mine", nodes=1)
    acting = ["Drain", "Evict", "Stop", "Nodes…", "Resume", "Requeue", "Discard", "Silence"]
    with watched(token=scene.token("viewer")) as seen:
        page = seen.page
        expect(page.locator("#role")).to_have_text("viewer")
        places = {
            "fleet/attic-gpu": ".node-panel .facts", f"jobs/{job}": "#job-title",
            "queues": "#queues-title", "events": "tbody tr",
        }  # fmt: skip
        for place, there in places.items():
            seen.go(place)
            expect(page.locator(there).first).to_be_visible()
            for name in acting:
                assert page.get_by_role("button", name=name, exact=True).count() == 0, (place, name)
        expect(page.get_by_role("link", name="Audit log")).to_be_hidden()
        expect(page.locator("#ticket")).to_be_hidden()
        assert seen.problems == []


def test_tokens_open_the_page_only_for_people(browser: object, hub: HubServer) -> None:
    def login(token: str) -> httpx.Response:
        return httpx.post(
            f"{hub.url}/login", data={"token": token}, trust_env=False, timeout=PATIENCE_S
        )

    refused = login("wrong")
    assert refused.status_code == 401
    assert "not valid at this hub" in refused.text
    secret = hub.ticket.rpartition("/")[2]
    body = {"secret": secret, "name": "box"}
    joined = httpx.post(
        f"{hub.url}/api/join", json=body, trust_env=False, timeout=PATIENCE_S
    ).json()
    assert "the token of node box" in login(joined["token"]).text
    good = login(hub.operator_token)
    assert (good.status_code, good.headers["location"]) == (303, "./")


@pytest.mark.parametrize(
    "name",
    ["../pages.py", "app.py", "index.html", "nothing.js", "%2e%2e", "lib", "lib/../../sse.py"],
)
def test_static_files_are_only_those_of_the_page(hub: HubServer, name: str) -> None:
    assert httpx.get(
        f"{hub.url}/static/{name}", trust_env=False, timeout=PATIENCE_S
    ).status_code in (401, 404)
