"""What `atoll status` shows of jobs that wait, run and failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from atoll.cli.views.tables import job_table, jobs_table, nodes_table, remarks


def shown(thing: Any, *, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(thing, soft_wrap=not hasattr(thing, "columns"))
    return capture.get()


def job(name: str, state: str, **more: Any) -> dict[str, Any]:
    return {
        "job": name, "state": state, "reason": "", "error": None, "nodes_wanted": 1,
        "min_nodes": 0, "members": [], "committed_round": 0, "aborted_rounds": 0, "created": 1.0,
        "started": None, "ended": None, "priority": 0, "batch": "", "retries": 0, "places": [],
        **more,
    }  # fmt: skip


FAILED = job(
    "wide-20261121-110414", "failed", reason="w0: w0 ended with exit status 3",
    error={"kind": "ScriptError", "what": "x", "remedy": "atoll logs"}, exit_code=3,
    failed_member="w0", failed_node="lap3", places=["lap3"], started=1.0, ended=61.0,
    last_lines=[f"line {n}" for n in range(9)], retries=2, retried=2, batch="four-1a2b",
)  # fmt: skip
WAITING = job(
    "deep-20261121-110415", "waiting", reason="needs 1 nodes, 0 are free: lap4: on battery"
)


def test_narrow_screens_show_whole_job_names() -> None:
    table = shown(jobs_table([FAILED, WAITING]))
    assert FAILED["job"] in table
    assert WAITING["job"] in table
    assert "batch" in table.splitlines()[0]
    assert "priority" not in table
    assert "priority" in shown(jobs_table([job("a", "waiting", priority=3)]), width=120)


def test_remarks_say_why_jobs_wait_and_how_they_failed() -> None:
    text = shown(remarks([FAILED, WAITING, job("fine", "done", reason="")]))
    assert "deep-20261121-110415 waiting: needs 1 nodes, 0 are free: lap4: on battery" in text
    assert "wide-20261121-110414 failed exit status 3: w0: w0 ended with exit status 3" in text
    assert "last lines of w0 on lap3:" in text
    assert "line 3" not in text
    assert "line 4\n" in text
    assert "line 8\n" in text
    assert "what to do: atoll logs" in text
    assert "fine" not in text


def test_one_job_is_shown_in_full() -> None:
    text = shown(job_table(FAILED), width=120)
    for words in ("four-1a2b", "1, on lap3", "2 of 2 used", "line 0", "exit status 3"):
        assert words in text


def test_node_that_takes_no_work_says_why() -> None:
    info = {"cores": 4, "memory_bytes": 8e9, "torch": "2", "offer": {"paused": "on battery"}}
    node = {"node": "lap4", "state": "online", "last_seen_s": 1.0, "info": info, "running": []}
    assert "on battery" in shown(nodes_table([node]), width=120)
    assert "lost" in shown(nodes_table([{**node, "state": "lost"}]), width=120)


def test_nodes_name_their_device_and_an_idle_one() -> None:
    info = {"cores": 4, "memory_bytes": 8e9, "torch": "2", "computes_on": "processor"}
    node = {"node": "lap4", "state": "online", "last_seen_s": 1.0, "running": []}
    idle = {**info, "idle": "an accelerator of NVIDIA is idle: its driver is missing"}
    text = shown(nodes_table([{**node, "info": idle}]), width=120)
    assert "processor" in text
    assert "lap4: an accelerator of NVIDIA is idle: its driver is missing" in text
    assert "idle" not in shown(nodes_table([{**node, "info": info}]), width=120)


def test_further_machines_of_a_member_stand_behind_it() -> None:
    row = {"state": "running", "slot": 0, "step": 7, "sent_bytes": 0, "received_bytes": 0}
    members = [
        {**row, "member": "w1", "slot": 1, "node": "lap3"},
        {**row, "member": "w0", "node": "lap1"},
    ]
    follower = {
        **row,
        "member": "w0.1",
        "node": "lap2",
        "follower_of": "w0",
        "step": None,
        "values": {},
    }
    view = job(
        "island", "running", nodes_wanted=2, machines=2, members=members, followers=[follower],
        island="shard=2 on 2 machines", started=1.0, places=["lap1", "lap2", "lap3"],
    )  # fmt: skip
    text = shown(job_table(view), width=120)
    assert "each member: shard=2 on 2 machines" in text
    rows = [line.split() for line in text.splitlines() if line.split() and line[0] == "w"]
    assert [(name, where, step) for name, where, _, step, *_ in rows] == [
        ("w0", "lap1", "7"), ("w0.1", "lap2", "-"), ("w1", "lap3", "7"),
    ]  # fmt: skip
    assert "2 x 2" in shown(jobs_table([view]), width=120)
