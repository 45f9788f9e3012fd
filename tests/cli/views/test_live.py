"""The view of a running job, drawn into a string."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from atoll.cli.views.job import Watched
from atoll.cli.views.live import View, plain_line


def member(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "member": f"w{number}",
        "node": f"node{number}",
        "slot": number,
        "state": "running",
        "step": 100 + number,
        "loss": 2.0 + number,
        "tokens_per_s": 1000.0,
        "sent_bytes": 50_000,
        "received_bytes": 60_000,
        "last_seen_s": 0.4,
        **changes,
    }


def watched(*members: dict[str, Any], **changes: Any) -> Watched:
    view = {
        "job": "demo-1",
        "state": "running",
        "reason": "",
        "nodes_wanted": len(members),
        "members": list(members),
        "committed_round": 3,
        "progress": {"step": 100, "steps": 400},
    }
    return Watched("demo-1", view={**view, **changes}, loss=2.5, held_out=2.4, parameters=120_000)


class FakeHub:
    """Answers like the hub's client, from lists."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []

    def job(self, job: str) -> dict[str, Any]:
        return watched(member(0), member(1)).view

    def metrics(self, job: str, *, after: int = 0) -> dict[str, Any]:
        news = [point for point in self.points if point["id"] > after]
        return {"last": news[-1]["id"] if news else after, "points": news}

    def events(self, job: str, *, after: int = 0) -> dict[str, Any]:
        return {"last": after, "events": []}


def point(number: int, name: str, **values: float) -> dict[str, Any]:
    return {"id": number, "member": name, "round": 1, "step": number, "values": values}


def test_loss_is_the_mean_of_the_members_last_losses() -> None:
    hub, job = FakeHub(), Watched("demo-1")
    hub.points = [point(1, "w0", loss=4.0), point(2, "w1", loss=2.0), point(3, "w0", loss=3.0)]
    job.refresh(hub)  # type: ignore[arg-type]
    assert job.loss == pytest.approx(2.5)
    hub.points.append(point(4, "w1", loss=1.0))
    job.refresh(hub)  # type: ignore[arg-type]
    assert job.loss == pytest.approx(2.0)


def test_data_parallel_is_a_ring_all_reduce_of_every_step() -> None:
    progress = {"step": 10, "steps": 400}
    job = watched(member(0), member(1), member(2), member(3), progress=progress)
    assert job.data_parallel_bytes == 2 * 3 / 4 * 4 * 120_000 * 10
    assert watched(member(0)).data_parallel_bytes == 0


def test_progress_and_time_left_are_those_of_the_hub() -> None:
    assert watched(member(0)).left_s is None
    job = watched(member(0), progress={"step": 300, "steps": 400, "left_s": 20.0})
    assert (job.step, job.share, job.left_s) == (300, 0.75, 20.0)
    assert "ETA 0:20" in plain_line(job)
    script = watched(member(0), progress={"step": 77, "steps": 0, "left_s": None})
    assert script.share is None
    assert "77/" not in plain_line(script)
    assert "ETA" not in plain_line(script)


def test_view_has_node_rows_and_traffic_saved() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, record=True)
    with View(console, dashboard="http://127.0.0.1:1/?token=x") as view:
        view.show(watched(member(0), member(1, state="lost")))
    shown = console.export_text()
    for words in (
        "node0",
        "node1",
        "lost",
        "by data parallel",
        "x less",
        "http://127.0.0.1:1",
        "25%",
    ):
        assert words in shown, words


def test_waiting_job_in_the_view_is_its_reason() -> None:
    reason = "needs 40 nodes, 9 are free (lap1, lap2 and 7 more: its owner does not allow scripts)"
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    with View(console, dashboard="x", note="Ctrl+C leaves it running") as view:
        view.show(watched(state="waiting", reason=reason))
    shown = console.export_text()
    assert "scripts)" in shown  # all of it, over two lines
    assert "Ctrl+C leaves it running" in shown
    assert "ETA" not in shown
    assert "last seen" not in shown
    assert max(map(len, shown.replace("╭", "\n╭").splitlines())) <= 80


def test_without_a_terminal_lines_are_plain_and_few() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=False, width=80)
    with View(console, dashboard="x") as view:
        for _ in range(10):
            view.show(watched(member(0), member(1)))
        view.show(watched(member(0), member(1)), last=True)
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert "step 100/400" in lines[0]
    assert "loss 2.500" in lines[0]
    assert "\x1b" not in file.getvalue()


def test_without_a_terminal_the_first_loss_is_shown_at_once() -> None:
    file = io.StringIO()
    with View(Console(file=file, force_terminal=False, width=80), dashboard="x") as view:
        for loss in (None, None, 2.5, 2.4, 2.3):
            job = watched(member(0))
            job.loss = loss
            view.show(job)
    assert [line.partition("loss ")[2][:5] for line in file.getvalue().splitlines()] == [
        "",
        "2.500",
    ]


def test_waiting_job_says_what_for() -> None:
    job = watched(state="waiting", reason="needs 4 nodes, 1 is free")
    assert "needs 4 nodes" in plain_line(job)


def test_starting_job_says_which_machines_it_waits_for() -> None:
    why = "waiting for lap3 to start: loading torch, the model and the data"
    job = watched(member(0, state="starting", step=0), starting=why)
    assert why in plain_line(job)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    with View(console, dashboard="x") as view:
        view.show(job)
    assert why in console.export_text()


def event(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "text": text, "member": "w0"}


def test_cause_of_a_failed_job_is_left_to_its_end() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=False, width=80)
    with View(console, dashboard="x") as view:
        job = watched(member(0))
        job.events = [event("member-failed", "node0's worker ended with exit status 1: KeyError")]
        view.show(job)
        failed = watched(member(0), state="failed", reason="node0: KeyError")
        failed.events = [event("alarm", "demo-1 failed: KeyError"), event("late", "node0 was late")]
        view.show(failed, last=True)
    assert "KeyError" not in file.getvalue()
    assert "node0 was late" in file.getvalue()


def test_failure_of_a_member_whose_job_goes_on_is_shown() -> None:
    file = io.StringIO()
    with View(Console(file=file, force_terminal=False, width=80), dashboard="x") as view:
        job = watched(member(0))
        job.events = [event("member-failed", "node0's worker was killed (SIGKILL); restarting")]
        view.show(job)
        job.events = []
        view.show(job)
    assert file.getvalue().count("(SIGKILL); restarting") == 1
