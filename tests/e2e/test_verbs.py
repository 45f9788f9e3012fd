"""The other verbs, against a hub with one node and scripts as jobs."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from tests.e2e.conftest import Atoll, ticket_of, until, wait_for

pytestmark = pytest.mark.e2e

SLOW = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"
QUICK = "import sys\nprint('arguments', sys.argv[1:])\nprint('done')\n"


def test_life_of_a_job_through_the_verbs(atoll: Atoll) -> None:
    hub = atoll.hub()
    node = atoll.join(ticket_of(hub), name="kitchen")
    (atoll.folder / "slow.py").write_text(SLOW)
    (atoll.folder / "quick.py").write_text(QUICK)
    with hub.client() as client:
        until(lambda: client.nodes())
        submitted = atoll.run("run", "slow.py", "--detach")
        assert submitted.code == 0, submitted.both
        assert "submitted" in submitted.out
        (view,) = client.jobs()
        job = view["job"]
        until(lambda: client.logs(job)["lines"])
        shown = atoll.run_here("status")
        assert "kitchen" in shown.out
        assert job in shown.out
        assert "running" in atoll.run_here("status", job).out
        assert json.loads(atoll.run_here("status", "--json").out)["jobs"][0]["job"] == job
        assert "begun" in atoll.run_here("logs").out
        stopped = atoll.run_here("stop", "slow", "--grace", "0.3")
        assert stopped.code == 0, stopped.both
        assert "stopped" in stopped.out
        resumed = atoll.run_here("resume", job, "--detach")
        assert resumed.code == 0, resumed.both
        wait_for(client, job, "running")
        assert atoll.run_here("stop", job, "--grace", "0.3").code == 0
    done = atoll.run("run", "quick.py", "--", "--x", "1")
    assert done.code == 0, done.both
    assert "arguments ['--x', '1']" in done.out
    followed = atoll.run("logs", "-f")
    assert followed.code == 0
    assert "kitchen done" in followed.out
    assert "kitchen done" in atoll.run("logs", "--member", "kitchen").out
    unknown = atoll.run("logs", "--member", "attic")
    assert (unknown.code, "expected:   kitchen" in unknown.err) == (2, True), unknown.both
    node.interrupt()
    left = node.wait()
    assert left.code == 0, left.both
    assert "joined" in left.out
    assert "left the hub" in left.out


def test_logged_in_user_may_run_a_job_but_a_node_may_not(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="kitchen")
    (atoll.folder / "quick.py").write_text(QUICK)
    with hub.client() as client:
        until(lambda: client.nodes())
        ticket = client.create_ticket(role="operator", uses=1)
    for words in ((), ("--hub", ticket_of(hub))):
        refused = atoll.start("run", "quick.py", *words, home=atoll.folder / "kitchen").wait()
        assert refused.code != 0
        assert "atoll ticket new --role operator" in refused.err
    laptop = atoll.folder / "laptop"
    done = atoll.start("run", "quick.py", "--hub", ticket, home=laptop).wait()
    assert done.code == 0, done.both
    again = atoll.start("run", "quick.py", home=laptop).wait()
    assert again.code == 0, again.both


def test_ctrl_c_of_a_remote_run_leaves_the_job_running(atoll: Atoll) -> None:
    hub = atoll.hub()
    atoll.join(ticket_of(hub), name="kitchen")
    (atoll.folder / "slow.py").write_text(SLOW)
    running = atoll.start("run", "slow.py")
    with hub.client() as client:
        job = until(lambda: client.jobs() and client.jobs()[0]["job"])
        wait_for(client, job, "running")
        time.sleep(0.5)  # the hub knows of the job before the command has its answer
        running.interrupt()
        done = running.wait()
        assert done.code == 130
        assert "continues in the background" in done.out
        assert f"atoll stop {job}" in done.out or "atoll stop JOB" in done.out
        assert client.job(job)["state"] == "running"


@pytest.mark.long("tests/e2e/test_hub_restart.py::test_workers_train_on_while_the_hub_is_dead")
def test_hub_stops_on_ctrl_c_and_takes_its_jobs_up_again(atoll: Atoll) -> None:
    running = atoll.start("hub", "--host", "127.0.0.1", "--port", "0")
    until(lambda: (atoll.home / "hubs.json").exists())
    running.interrupt(signal.SIGINT)
    done = running.wait()
    assert done.code == 0, done.both
    assert "atoll join atoll://" in done.out
    assert "dashboard" in done.out


def test_ticket_is_printed_again(atoll: Atoll) -> None:
    hub = atoll.hub()
    assert atoll.run_here("ticket").out.strip() == ticket_of(hub)


def test_doctor_passes_on_this_machine_with_a_hub(atoll: Atoll) -> None:
    atoll.hub()
    done = atoll.run("doctor", "--port", "0")
    assert done.code == 0, done.both
    names = ("Python", "torch", "port", "disk", "hub", "clock", "download", "upload")
    for name in names:
        assert f"pass  {name}" in done.out, done.out
    busy = "note  matmul .*(the machine is probably busy|the trial took longer)"
    assert re.search(f"pass  matmul|{busy}", done.out), done.out
    assert "device    " in done.out


JOB = """
[model]
layers = 1
width = 32
heads = 2
context = 32
[train]
batch = 2
steps = 60
eval_tokens = 64
"""


def test_doctor_of_a_live_fleet_prints_lines_that_run(atoll: Atoll) -> None:
    hub = atoll.hub()
    for name in ("anna", "ben"):
        atoll.join(ticket_of(hub), name=name)
    with hub.client() as client:
        until(lambda: sum("up_bps" in (row.get("stats") or {}) for row in client.nodes()) == 2)
    (atoll.folder / "job.toml").write_text(JOB)
    done = atoll.run("doctor", "--port", "0", "--job", "job.toml")
    assert done.code == 0, done.both
    assert "the weakest hop of 4: " in done.out  # two machines, to the hub and back
    assert "atoll plan fleet --lines 0.5" in done.out  # what a plan misses, and what to do
    text = done.out.partition("atoll plan says why):")[2]
    pasted = "\n".join(line.strip() for line in text.splitlines())
    assert "[strategy]" in pasted
    (atoll.folder / "job.toml").write_text(pasted + JOB)
    done = atoll.run("run", "job.toml")
    assert done.code == 0, done.both


def test_doctor_fails_with_a_remedy_if_the_hub_is_absent(atoll: Atoll) -> None:
    done = atoll.run_here("doctor", "--hub", "atoll://127.0.0.1:9/" + "x" * 32, "--port", "0")
    assert done.code == 1
    assert "FAIL  hub" in done.out
    assert "->" in done.out
