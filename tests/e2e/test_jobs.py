"""Separate jobs on the nodes of one hub: placed by what they need, each ending for itself."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli.hub_access import KnownHub, find
from atoll.errors import AtollError
from atoll.net.http.client import HubClient
from bench.kit.ports import free_port
from tests.e2e.conftest import ENDLESS, Atoll, lines_until, ticket_of, until, wait_for

pytestmark = pytest.mark.e2e

THREE = """
[data]
corpus = "files:{text}"
[model]
layers = 1
width = 16
heads = 2
context = 16
[train]
steps = 20
batch = 4
warmup = 5
eval_tokens = 512
[strategy]
every = 10

[[jobs]]
[jobs.job]
name = "one"
on = ["lap1"]
[[jobs]]
[jobs.job]
name = "two"
on = ["lap2"]
[jobs.model]
width = 32
[jobs.train]
lr = 1e-3
[[jobs]]
[jobs.job]
name = "broken"
on = ["lap3"]
script = "broken.py"
"""

BROKEN = "print('this is the last line', flush=True)\nraise SystemExit(3)\n"


def join(atoll: Atoll, hub: KnownHub, *names: str, slots: int = 1) -> None:
    """Let machines join that do not measure themselves; return when all are there."""
    for name in names:
        words = ["--name", name, "--no-measure", "--slots", str(slots)]
        popen = subprocess.Popen(
            [sys.executable, "-m", "atoll.node", *words, "--home", str(atoll.folder / name)],
            env={**atoll.environment(), "ATOLL_TICKET": ticket_of(hub)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        atoll.started.append(popen)
    with hub.client() as client:
        until(lambda: {v["node"] for v in client.nodes() if v["state"] == "online"} >= set(names))


def write(atoll: Atoll, name: str, text: str) -> str:
    (atoll.folder / name).write_text(text)
    return name


def command(*, name: str, run: str, more: str = "") -> str:
    """Return a job file that runs a line of Python."""
    return f'[job]\nname = "{name}"\ncommand = ["{sys.executable}", "-c", """{run}"""]\n{more}'


def test_failing_job_does_not_affect_two_others(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1", "lap2", "lap3")
    atoll.job()  # writes the text
    write(atoll, "three.toml", THREE.format(text=atoll.folder / "text.txt"))
    write(atoll, "broken.py", BROKEN)
    done = atoll.run("run", "three.toml")
    assert done.code == 1, done.both
    assert "this is the last line" in done.err
    assert "exit status 3" in done.err
    with hub.client() as client:
        views = {view["job"].partition("-")[0]: view for view in client.jobs()}
    assert {name: view["state"] for name, view in views.items()} == {
        "one": "done", "two": "done", "broken": "failed",
    }  # fmt: skip
    assert len({view["batch"] for view in views.values()}) == 1
    assert views["one"]["batch"].startswith("three-")
    places = [views[name]["places"] for name in ("one", "two", "broken")]
    assert places == [["lap1"], ["lap2"], ["lap3"]]
    assert all(len(view["members"]) == 1 for view in views.values())
    assert all(view["retried"] == 0 for view in views.values())
    broken = views["broken"]
    assert broken["failed_node"] == "lap3"
    shown = atoll.run_here("status").out
    assert "lap3" in shown
    assert "this is the last line" in shown
    for name in ("one", "two"):
        assert (atoll.runs / views[name]["job"] / "model.safetensors").exists()


def test_job_waits_for_a_fitting_node_by_priority(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "small")
    quick = command(name="quick", run="print('ran', flush=True)")
    with hub.client() as client:
        held = client.submit(command(name="held", run="import time; time.sleep(60)"))
        wait_for(client, held, "running")
        low = client.submit(command(name="low", run="print('low', flush=True)"))
        high = client.submit(quick.replace('name = "quick"', 'name = "high"\npriority = 5'))
        picky = client.submit(command(name="picky", run="print(1)", more='on = ["large"]\n'))
        view = client.job(low)
        assert view["state"] == "waiting"
        assert "small: busy" in view["reason"]
        assert "may run on large only" in client.job(picky)["reason"]
        assert "may run on large only" in " ".join(atoll.run_here("status", picky).out.split())
        client.stop(held, grace_s=0.2)
        ended = [wait_for(client, job, "done") for job in (high, low)]
        assert ended[0]["ended"] <= ended[1]["started"]
        assert client.job(picky)["state"] == "waiting"
        join(atoll, hub, "large")
        assert wait_for(client, picky, "done")["places"] == ["large"]


def test_program_is_tried_again_as_often_as_its_job_says(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1")
    count = atoll.folder / "count"
    counting = (
        f"import pathlib, sys; p = pathlib.Path('{count}'); n = len(p.read_text()) if p.exists() "
        "else 0; p.write_text('x' * (n + 1)); print('attempt', n + 1, flush=True); "
    )
    with hub.client() as client:
        begun = time.monotonic()
        twice = command(name="twice", run=counting + "sys.exit(n < 2)", more="retries = 2\n")
        view = wait_for(client, client.submit(twice), "done")
        assert count.read_text() == "xxx"
        assert view["retried"] == 2
        assert time.monotonic() - begun >= 3.0  # pauses of 1 s and 2 s
        count.unlink()
        job = client.submit(command(name="never", run=counting + "sys.exit(7)", more="retries = 1"))
        view = wait_for(client, job, "failed")
        assert count.read_text() == "xx"
        until(lambda: client.job(job)["exit_code"] == 7)
        view = client.job(job)
        assert view["last_lines"] == ["attempt 2"]
        assert view["error"]["remedy"]
        shown = atoll.run_here("status", job).out
        assert "exit status 7" in shown
        assert "attempt 2" in shown


def test_command_brings_its_code_and_its_results_come_back(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1")
    code = atoll.folder / "project" / "src"
    (code / "tools").mkdir(parents=True)
    (code / "tools" / "words.py").write_text("WORDS = 'from the code'\n")
    (code / "train.sh").write_text(
        'mkdir out && python -c "import tools.words as w; print(w.WORDS)" | tee out/result.txt\n'
        "echo not-kept > out/secret.tmp\n"
    )
    job_file = atoll.folder / "project" / "job.toml"
    job_file.write_text(
        '[job]\nname = "sh"\ncode = "src"\ncommand = ["bash", "train.sh"]\n'
        'artifacts = ["out/*.txt"]\n'
    )
    done = atoll.run("run", str(job_file))
    assert done.code == 0, done.both
    assert "from the code" in done.out
    with hub.client() as client:
        (view,) = client.jobs()
        assert view["kind"] == "command"
        assert 'code = "sha256:' in view["spec"]
    found = list((atoll.runs / view["job"] / "artifacts").rglob("*.*"))
    assert [path.name for path in found] == ["result.txt"]
    assert found[0].read_text() == "from the code\n"
    to = atoll.folder / "elsewhere"
    collected = atoll.run_here("collect", view["job"], "--to", str(to))
    assert collected.code == 0, collected.both
    assert [p.read_text() for p in to.rglob("result.txt")] == ["from the code\n"]


def test_each_runs_one_copy_on_every_node_that_fits(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1", "lap2")
    write(atoll, "job.toml", command(name="hello", run="import os; print(os.environ['ATOLL_JOB'])"))
    done = atoll.run("run", "job.toml", "--each")
    assert done.code == 0, done.both
    with hub.client() as client:
        views = client.jobs()
        assert sorted(view["places"] for view in views) == [["lap1"], ["lap2"]]
        assert sorted(view["job"][:10] for view in views) == ["hello-lap1", "hello-lap2"]
    only = atoll.run_here("run", "job.toml", "--each", "--on", "lap2", "--detach")
    assert only.code == 0, only.both
    assert "left out: hello: lap1: not among" in only.out
    refused = atoll.run_here("run", "job.toml", "--each", "--set", "needs.memory_gb=1e6")
    assert refused.code == 1
    assert "no node can run this job" in refused.err


@pytest.mark.long(
    "tests/node/launchers/test_process.py::test_stop_ends_the_whole_tree_within_the_grace"
)
def test_stop_asks_a_command_to_end_and_kills_one_that_does_not(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1", slots=2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += "print('deaf', flush=True); time.sleep(99)"
    polite = "import signal, sys, time; "
    polite += (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0))); "
    )
    polite += "print('here', flush=True); time.sleep(99)"
    with hub.client() as client:
        first = client.submit(command(name="polite", run=polite))
        second = client.submit(command(name="deaf", run=deaf))
        until(lambda: client.logs(first)["lines"] and client.logs(second)["lines"])
        for job in (first, second):
            client.stop(job, grace_s=1.0)
        wait_for(client, first, "stopped", "done")
        lines_until(client, first, "saved")
        wait_for(client, second, "stopped")
    until(lambda: not atoll.running(deaf))


def test_command_survives_a_hub_restart(atoll: Atoll) -> None:
    port = str(free_port())
    words = ("hub", "--host", "127.0.0.1", "--port", port)
    running = atoll.start(*words)
    until(lambda: (atoll.home / "hubs.json").exists())
    hub = find(home=atoll.home)
    join(atoll, hub, "lap1")
    gate = atoll.folder / "gate"
    waits = (
        f"import os, pathlib, time; print('begun', flush=True)\n"
        f"while not pathlib.Path('{gate}').exists(): time.sleep(0.05)\n"
        "print('through', flush=True)"
    )
    with hub.client() as client:
        job = client.submit(command(name="patient", run=waits))
        until(lambda: client.logs(job)["lines"])
    running.interrupt(signal.SIGKILL)
    running.wait()
    atoll.start(*words)
    with hub.client() as client:
        until(lambda: online(client, "lap1"))
        gate.touch()
        (member,) = wait_for(client, job, "done")["members"]
        assert member["attempt"] == 1
        lines_until(client, job, "through")


def online(client: HubClient, node: str) -> bool:
    """Return whether a node is connected; not while the hub is away."""
    with contextlib.suppress(AtollError):
        return any(v["node"] == node and v["state"] == "online" for v in client.nodes())
    return False


@pytest.mark.long(
    "tests/hub/scheduler/test_scaling.py::test_job_shrinks_and_grows_again_while_its_rounds_go_on"
)
def test_running_group_shrinks_and_grows(atoll: Atoll) -> None:
    hub = atoll.hub()
    join(atoll, hub, "lap1", "lap2", "lap3")
    path = atoll.job(steps=ENDLESS, every=50, paced=True, nodes="{min = 1, max = 2}")
    assert atoll.run("run", str(path), "--detach").code == 0
    with hub.client() as client:
        job = client.jobs()[0]["job"]
        until(lambda: rounds_with(client, job, 2))
        before = epoch(client, job)
        assert atoll.run("scale", job, "1:1").code == 0
        until(lambda: rounds_with(client, job, 1, after=before))
        assert atoll.run("scale", job, "1:3").code == 0  # more than the data is sharded into
        until(lambda: rounds_with(client, job, 3, after=before))
        view = client.job(job)
        assert view["state"] == "running"
        assert view["resume_round"] > 0  # it went on from what it had saved
        client.stop(job, grace_s=20)
        wait_for(client, job, "stopped")


def epoch(client: HubClient, job: str) -> int:
    """Return the number of the newest decided attempt of a round."""
    newest = 0
    while rounds := client.rounds(job, after=newest)["rounds"]:
        newest = max(int(row["epoch"]) for row in rounds)
    return newest


def rounds_with(client: HubClient, job: str, members: int, *, after: int = 0) -> bool:
    """Return whether a round after an attempt was committed by exactly so many members."""
    while rounds := client.rounds(job, after=after)["rounds"]:
        if any(r["committed"] and len(r["contributors"]) == members for r in rounds):
            return True
        after = max(int(row["epoch"]) for row in rounds)
    return False


def test_logs_of_an_embedded_run_are_followed_to_its_end(atoll: Atoll) -> None:
    lines = "".join(f"print('line {n}', flush=True); time.sleep(0.3)\n" for n in range(10))
    write(atoll, "talk.py", "import time\n" + lines)
    running = atoll.start("run", "talk.py", "--local", "1")
    found = until(lambda: list(atoll.runs.glob("talk-*/embedded.json")))
    followed = atoll.run("logs", "-f", str(Path(found[0]).parent))
    assert followed.code == 0, followed.both
    assert [f"line {n}" in followed.out for n in range(10)] == [True] * 10
    assert running.wait().code == 0
