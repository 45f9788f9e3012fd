"""Jobs that have ended are deleted from their page and from the list, each after a question."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.scene import Scene
from tests.dashboard.test_actions import answer


def ended(scene: Scene, name: str) -> str:
    """Return a job that was stopped before it began, with a checkpoint's file."""
    job = scene.submit(name, nodes=900, least=900)
    path = f"/api/jobs/{job}/files/checkpoints/round-000001/shared.safetensors"
    assert scene.http.put(path, content=bytes(2_000_000)).status_code == 201
    assert scene.http.post(f"/api/jobs/{job}/stop", json={"grace_s": 0}).status_code == 200
    return job


@pytest.mark.parametrize(("width", "scheme"), [(1360, "dark"), (360, "light")])
@pytest.mark.every(2)
def test_a_job_that_has_ended_is_deleted_from_its_page(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    job = ended(scene, "old")
    with watched(width=width, scheme=scheme) as seen:
        page = seen.go(f"jobs/{job}")
        page.get_by_role("button", name="Delete", exact=True).click()
        told = page.get_by_role("dialog")
        expect(told).to_contain_text(f"Delete {job}?")
        expect(told).to_contain_text(re.compile(r"3 files, 2\.0 MB, 2\.0 MB of them checkpoints"))
        seen.keep(f"delete-{scheme}-{width}")
        page.keyboard.press("Escape")  # thinking better of it changes nothing
        expect(told).to_be_hidden()
        assert scene.http.get(f"/api/jobs/{job}").status_code == 200
        page.get_by_role("button", name="Delete", exact=True).click()
        answer(page, "Delete")
        seen.told(f"{job} is deleted")
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
        expect(page.locator("tbody")).not_to_contain_text(job)
        assert scene.http.get(f"/api/jobs/{job}").status_code == 404
        assert seen.problems == []


def test_a_page_of_a_job_that_somebody_else_deletes_says_so(scene: Scene, watched: Watch) -> None:
    job = ended(scene, "old")
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.get_by_role("button", name="Delete", exact=True)).to_be_visible()
        assert scene.http.delete(f"/api/jobs/{job}").status_code == 200
        expect(page.get_by_text("This job was deleted.")).to_be_visible()
        expect(page.get_by_role("button", name="Delete", exact=True)).to_have_count(0)


def test_chosen_jobs_are_deleted_unless_they_run(scene: Scene, watched: Watch) -> None:
    first, second = ended(scene, "one"), ended(scene, "two")
    waits = scene.submit("three", nodes=900, least=900)
    with watched() as seen:
        page = seen.go("jobs")
        for job in (first, second, waits):
            page.get_by_role("checkbox", name=f"Compare {job}").check()
        delete = page.get_by_role("button", name=re.compile("^Delete"))
        expect(delete).to_be_hidden()
        page.get_by_role("checkbox", name=f"Compare {waits}").uncheck()
        expect(delete).to_have_text("Delete 2")
        delete.click()
        answer(page, "Delete")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody")).to_contain_text(waits)
        expect(delete).to_be_hidden()
        assert seen.problems == []
