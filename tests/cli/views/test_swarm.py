"""The stages of a SWARM in a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from atoll.cli.views.job import Watched
from atoll.cli.views.live import View, plain_line
from atoll.cli.views.swarm import stages_part
from atoll.cli.views.tables import job_table
from tests.cli.views.test_tables import job, shown


def peer(member: str, node: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {
        "member": member, "name": node, "node": node, "state": state,
        "rows_per_s": 15.6, "queue": 0.0,
        "share": 0.5, "direct": 0.874, "failures": 0, "last_failure": "",
    } | more  # fmt: skip


def stage(number: int, *peers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "stage": number, "counted": 5, "agreed": False, "rows_per_s": 31.2, "slowest": False,
        "needs_bytes": 3_100_000_000, "peers": list(peers),
    } | more  # fmt: skip


SWARM: dict[str, Any] = {
    "step": 7, "microbatches": 16, "microbatches_per_s": 3.14, "waits_s": 40, "empty": [2],
    "measured": 3, "to_measure": 12,
    "paused": "no member serves stage 2: needs 3.1 GB of memory", "coming": ["lap7"],
    "whole": ["attic", "cellar"],
    "stages": [
        stage(0, peer("w0", "a-machine-with-a-rather-long-name", queue=12.0)),
        stage(1, peer("w1", "lap1", "banned", direct=None),
              peer("w2", "lap2", "recovering", rows_per_s=None, share=None), slowest=True),
        stage(2),
    ],
    "moves": [{"time": 1.0, "member": "w3", "name": "lap3", "node": "lap3",
               "source": 1, "target": 2,
               "reason": "stage 2 was the slowest: 31 -> 44 rows/s"}],
}  # fmt: skip


def test_every_line_fits_eighty_columns_and_tells_all() -> None:
    text = shown(stages_part(SWARM))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "paused: no member serves stage 2: needs 3.1 GB of memory" in lines
    assert "lap3: stage 1 -> 2, stage 2 was the slowest: 31 -> 44 rows/s" in lines
    assert "whole model: attic, cellar" in lines
    assert "no stage fits: lap7" in lines
    rows = [line.split() for line in lines]
    assert ["1", "slow", "5/16", "lap1", "banned", "16", "0", "50%", "-"] in rows
    assert ["lap2", "recovering", "-", "0", "-", "87%"] in rows
    assert ["2", "5/16", "needs", "3.1", "GB", "no", "member", "-", "-", "-", "-"] in rows
    assert "no member" in text


def test_status_and_the_live_view_show_the_stages() -> None:
    view = job("large", "running", kind="trainer", swarm=SWARM, paused=True)
    assert "1 slow" in shown(job_table(view))
    console = Console(width=80, record=True)
    drawn = View(console, dashboard="x")._picture(Watched("large", view=view), dashboard="x")
    assert "microbatches/s 3.1  held-out 3/12" in shown(drawn)
    assert max(len(line) for line in shown(drawn).splitlines()) <= 80


def test_plain_lines_say_why_it_is_paused() -> None:
    view = job("large", "running", swarm=SWARM, paused=True)
    view["progress"] = {"step": 7, "steps": 20}
    view["members"] = [{"member": "w0", "slot": 0, "state": "running", "step": 0}]  # it came back
    line = plain_line(Watched("large", view=view))
    assert "step 7/20" in line
    assert "large paused | no member serves stage 2: needs 3.1 GB of memory" in line
