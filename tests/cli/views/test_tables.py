"""What `atoll status` shows of jobs that wait, run and failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group

from atoll.cli.views.tables import failures, job_table, jobs_table, nodes_table, remarks


def shown(thing: Any, *, width: int = 80, soft_wrap: bool | None = None) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        wraps = not hasattr(thing, "columns") if soft_wrap is None else soft_wrap
        console.print(thing, soft_wrap=wraps)
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
    "deep-20261121-110415", "waiting", reason="needs 1 node, 0 are free (lap4: on battery)"
)


RUNNING = job(
    "gpt-20261121-110416", "running", started=1.0, loss=2.3456,
    progress={"step": 300, "steps": 400, "left_s": 20.4, "training_s": 61.0}, nodes_wanted=4,
    members=[{"member": "w0", "node": "lap1", "slot": 0, "state": "running", "step": 300}],
    places=["lap1", "lap2"],
)  # fmt: skip


def test_jobs_take_one_line_each_at_80_columns() -> None:
    table = shown(jobs_table([FAILED, WAITING, RUNNING]), soft_wrap=False).rstrip().splitlines()
    assert table[0].split() == ["job", "state", "%", "loss", "ETA", "elapsed"]
    assert [line.split()[0] for line in table[1:]] == [
        FAILED["job"],
        WAITING["job"],
        RUNNING["job"],
    ]
    assert table[3].split()[1:] == ["running", "75", "2.346", "0:20", "1:01"]
    assert table[2].split()[1:] == ["waiting", "-", "-", "-", "-"]
    assert all(len(line) <= 80 for line in table)


def test_wide_terminals_show_where_jobs_run() -> None:
    table = shown(jobs_table([FAILED, RUNNING], width=120), width=120)
    assert table.splitlines()[0].split()[-4:] == ["batch", "nodes", "rounds", "where"]
    assert "lap1, lap2" in table
    assert "priority" in shown(jobs_table([job("a", "waiting", priority=3)], width=120), width=120)


def test_running_job_shows_its_progress() -> None:
    text = shown(job_table(RUNNING), soft_wrap=False)
    assert "75%  step 300/400  ETA 0:20" in text
    assert "loss 2.346" in text
    assert "ended" not in text


def test_machines_take_one_line_each_at_80_columns() -> None:
    info = {"cores": 16, "memory_bytes": 64e9, "torch": "2.13.0", "gpu": "NVIDIA H100 80GB HBM3"}
    node = {"node": "workstation-of-mary", "state": "online", "last_seen_s": 7200.0, "info": info}
    lines = shown(
        nodes_table([{**node, "running": ["gpt-20261121-110416"]}, {**node, "running": []}])
    ).splitlines()
    assert len(lines) == 3
    assert "2 h" in lines[1]
    assert "torch" not in lines[0]
    other = {**node, "running": [], "info": {**info, "torch": "2.9.0"}}
    named = [{**node, "node": name, "running": []} for name in ("lap10", "lap9")]
    rows = shown(nodes_table(named)).splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["lap9", "lap10"]
    mixed = shown(nodes_table([{**node, "running": []}, other]), width=120)
    assert "2.13.0" in mixed
    assert "2.9.0" in mixed


def test_machine_with_many_jobs_keeps_its_name_at_80_columns() -> None:
    info = {"cores": 16, "memory_bytes": 64e9, "torch": "2", "gpu": "NVIDIA GeForce RTX 3090"}
    running = [f"a-job-with-a-long-name-2026112{n % 4}-110416/w{n}" for n in range(9)]
    node = {"node": "workstation-of-mary", "state": "online", "last_seen_s": 7200.0, "info": info}
    lines = shown(nodes_table([{**node, "running": running}]), soft_wrap=False).splitlines()
    assert lines[1].startswith("workstation-of-ma")
    assert "4: a-job-with-a-long-na" in lines[1]
    assert max(map(len, lines)) <= 80
    wide = shown(nodes_table([{**node, "running": running}], width=120), width=120)
    assert all(
        words in wide for words in ("workstation-of-mary", "64.0 GB", "RTX 3090", "4: a-job")
    )


def test_waiting_job_in_full_is_its_reason_and_nothing_empty() -> None:
    view = {**WAITING, "min_nodes": 1, "progress": {"step": 0, "steps": 400, "left_s": None}}
    text = shown(job_table(view))
    assert "waiting: needs 1 node, 0 are free (lap4: on battery)" in text
    for empty in ("ETA", "rounds", "1 to 1", "last seen", "on -"):
        assert empty not in text, empty


def test_drained_machine_is_not_at_work() -> None:
    info = {"cores": 4, "memory_bytes": 8e9, "torch": "2"}
    node = {"node": "lap4", "state": "online", "last_seen_s": 1.0, "info": info, "running": []}
    assert "drained" in shown(nodes_table([{**node, "shown": "drained"}]))
    assert "left" in shown(nodes_table([{**node, "state": "left", "shown": "left"}]))


def test_remarks_say_why_jobs_wait_and_how_they_failed() -> None:
    text = shown(remarks([FAILED, WAITING, job("fine", "done", reason="")]))
    assert "deep-20261121-110415 waiting: needs 1 node, 0 are free (lap4: on battery)" in text
    assert "wide-20261121-110414 failed exit status 3: w0: w0 ended with exit status 3" in text
    assert "its last lines on lap3:" in text
    assert "line 3" not in text
    assert "line 4\n" in text
    assert "line 8\n" in text
    assert "what to do: atoll logs" in text
    assert "fine" not in text


def test_one_job_is_shown_in_full() -> None:
    text = shown(Group(job_table(FAILED), failures([FAILED], lines=9)), width=120)
    for words in ("four-1a2b", "1, on lap3", "2 of 2 used", "line 0", "exit status 3"):
        assert words in text


def test_node_that_takes_no_work_says_why() -> None:
    info = {"cores": 4, "memory_bytes": 8e9, "torch": "2", "offer": {"paused": "on battery"}}
    node = {"node": "lap4", "state": "online", "last_seen_s": 1.0, "info": info, "running": []}
    assert "on battery" in shown(nodes_table([{**node, "shown": "paused"}]), width=120)
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
    rows = [line.split() for line in text.splitlines() if line.startswith("lap")]
    assert [(name, where, step) for where, name, _, step, *_ in rows] == [
        ("w0", "lap1", "7"), ("w0.1", "lap2", "-"), ("w1", "lap3", "7"),
    ]  # fmt: skip
    assert "2 x 2" in shown(jobs_table([view], width=120), width=120)
