"""The page of a job whose members are islands says how they lie and what they compute with."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene

SPEC = """
[job]
name = "wide"
nodes = 1
[train]
precision = "bf16"
recompute = "full"
[strategy]
inner = "hybrid"
[island]
mesh = { replicate = 2, tensor = 2 }
"""


def test_one_line_says_mesh_ranks_inner_precision_and_recompute(
    scene: Scene, watched: Watch
) -> None:
    answer = scene.http.post("/api/jobs", json={"spec": SPEC})
    assert answer.status_code == 201, answer.text
    plain = scene.submit("plain")
    with watched(width=360) as seen:
        page = seen.go(f"jobs/{answer.json()['job']}")
        expect(page.locator("#job-each")).to_have_text(
            "each member: replicate=2 tensor=2 · hybrid, 4 ranks, bf16, recompute full"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page = seen.go(f"jobs/{plain}")
        expect(page.get_by_role("heading", name=plain)).to_be_visible()
        expect(page.locator("#job-each")).to_be_hidden()
        assert seen.problems == []
