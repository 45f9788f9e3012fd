"""Programs that know nothing of the hub, from the command to the report of their end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.config import JobSpec, JobTable, LaunchTable, NeedsTable
from atoll.node.agent import attempt as attempt_module
from atoll.node.agent.agent import Agent
from atoll.node.agent.workspace import Workspace
from atoll.node.launchers.launcher import Sandbox
from atoll.node.launchers.sandbox import check_possible
from atoll.node.processes.file_locks import FileLock
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import Offer, Offering, Stop
from tests.node.agent.lone_agent import Hub, launch, lone_agent, program
from tests.node.agent.preparing_machine import Machine
from tests.node.launchers.ordering import run, until
from tests.patience import PROMPT_S


def test_program_is_told_to_run_at_once_and_how_it_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (_, hub):
            hub.put(launch(program("sh", "-c", "echo one; exit 7")))
            end = await hub.ended()
            assert hub.states() == ["starting", "running", "exited"]
            assert hub.lines == ["one"]
            assert (end.exit_code, end.tail) == (7, ["one"])
            assert end.error is not None
            assert end.error["kind"] == "ScriptError"

    run(scenario())


def test_lines_and_artifacts_are_there_before_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def collect(*given: object) -> list[str]:
        hubs[0].received.append(Offering(Offer(text=["collected"])))
        on_line = given[-1]
        assert callable(on_line)
        on_line("sent")
        return []

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (_, hub):
            hubs.append(hub)
            hub.put(launch(program("echo", "hello", artifacts=["*"])))
            await hub.ended()
            kinds = [type(body).__name__ for body in hub.received]
            assert kinds.index("Offering") < len(kinds) - 1
            assert kinds[-1] == "ProcessState"
            assert hub.lines == ["hello", "sent"]

    hubs: list[Hub] = []
    monkeypatch.setattr(attempt_module, "collect", collect)
    run(scenario())


def test_artifacts_that_take_too_long_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def collect(*_: object) -> list[str]:
        await asyncio.Event().wait()
        return []

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (_, hub):
            hub.put(launch(program("true", artifacts=["*"])))
            assert (await hub.ended()).exit_code == 0
            assert "given up" in hub.lines[-1]

    monkeypatch.setattr(attempt_module, "collect", collect)
    monkeypatch.setattr(attempt_module, "ARTIFACTS_S", 0.1)
    run(scenario())


def test_failure_is_reported_before_its_artifacts_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        sent = asyncio.Event()

        async def collect(*given: object) -> list[str]:
            await sent.wait()
            return []

        monkeypatch.setattr(attempt_module, "collect", collect)
        async with lone_agent(tmp_path) as (_, hub):
            hub.put(launch(program("sh", "-c", "exit 3", artifacts=["*"])))
            end = await hub.ended()
            assert (end.exit_code, end.collecting) == (3, True)
            sent.set()
            await until(lambda: hub.states().count("exited") == 2)
            last = hub.end()
            assert last is not None
            assert (last.exit_code, last.collecting) == (3, False)

    run(scenario())


def test_next_process_waits_for_artifacts_of_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        order: list[str] = []
        sent = asyncio.Event()

        async def collect(*given: object) -> list[str]:
            await sent.wait()
            order.append("sent")
            return []

        monkeypatch.setattr(attempt_module, "collect", collect)
        async with lone_agent(tmp_path) as (_, hub):
            hub.put(launch(program("sh", "-c", "exit 3", artifacts=["*"]), token="old"))
            await hub.ended()
            hub.put(launch(program("echo", "new"), token="new"))
            await until(lambda: hub.states().count("starting") == 2)
            assert hub.lines == []
            sent.set()
            await until(lambda: hub.lines == ["new"])
            assert order == ["sent"]

    run(scenario())


def test_program_above_its_needs_of_memory_is_out_of_memory(tmp_path: Path) -> None:
    spec = dataclasses.replace(
        program("python", "-c", "x = bytearray(4 * 10**8); import time; time.sleep(60)"),
        needs=NeedsTable(memory_gb=0.1),
    )

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (_, hub):
            hub.put(launch(spec))
            end = await hub.ended()
            assert end.error is not None
            assert end.error["kind"] == "OutOfMemory"
            assert "memory_gb of the job" in end.error["expected"]

    run(scenario())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_two_programs_on_one_machine_get_different_cores(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    show = (
        "import os; print(sorted(os.sched_getaffinity(0)), flush=True); import time; time.sleep(60)"
    )
    spec = dataclasses.replace(program("python", "-c", show), needs=NeedsTable(cores=1))

    async def scenario() -> None:
        async with lone_agent(tmp_path, slots=2) as (_, hub):
            hub.put(launch(spec, member="w1", token="t1"))
            hub.put(launch(spec, member="w2", token="t2"))
            await until(lambda: len(hub.lines) == 2)
            assert len(set(hub.lines)) == 2

    run(scenario())


def test_code_is_the_working_folder_and_scripts_are_found_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JobSpec(job=JobTable(name="job", script="sub/train.py", code=f"sha256:{'0' * 64}"))
    agents: list[Agent] = []

    async def prepare(_: object, *, directory: Path, on_line: object) -> Workspace:
        sub = directory / "code" / "sub"
        sub.mkdir(parents=True)
        (sub / "train.py").write_text("import os, beside; print(os.getcwd(), beside.x)")
        (sub / "beside.py").write_text("x = 5")
        return Workspace(directory / "code", Path(sys.executable))

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            agents.append(agent)
            _prepare_by(agent, lambda *given, **named: prepare(given, **named), monkeypatch)
            hub.put(launch(spec))
            await hub.ended()
            assert hub.lines == [f"{tmp_path}/jobs/job-1/w1/code 5"]

    run(scenario())


def test_refused_lines_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            hub.refuses_lines = True
            hub.put(launch(program("echo", "of a member that has moved")))
            await hub.ended()
            await until(lambda: not agent.running)
            assert len(agent._machine.lines) == 0

    run(scenario())


# ------------------------------------------------------------------------- while it is prepared


class Slow:
    """A preparation that ends only when it is cancelled."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0

    async def prepare(self, *_: object, on_line: object, **__: object) -> Workspace:
        assert callable(on_line)
        on_line("[prepare] begins")
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


def _prepare_by(agent: Agent, prepare: object, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent._machine.preparer, "prepare", prepare)


def test_stop_ends_a_preparation_and_the_agent_serves_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        slow = Slow()
        async with lone_agent(tmp_path) as (agent, hub):
            _prepare_by(agent, slow.prepare, monkeypatch)
            hub.put(launch(program("true")))
            await until(lambda: hub.acked == 1 and hub.lines == ["[prepare] begins"])
            assert hub.states() == ["starting"]
            assert agent.running == ["job-1/w1"]
            hub.put(Stop("job-1", "w1", grace_s=10.0))
            end = await hub.ended()
            assert (end.exit_code, end.error) == (-signal.SIGTERM, None)
            assert slow.cancelled == 1
            await until(lambda: agent.running == [])

    run(scenario())


def test_leaving_ends_a_preparation_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        slow = Slow()
        async with lone_agent(tmp_path) as (agent, hub):
            _prepare_by(agent, slow.prepare, monkeypatch)
            hub.put(launch(program("true")))
            await until(lambda: slow.begun)
            begun = time.monotonic()
            await agent.leave()
            assert time.monotonic() - begun < PROMPT_S
            end = hub.end()
            assert end is not None
            assert end.exit_code == EXIT_LEFT
            assert slow.cancelled == 1

    run(scenario())


def test_newer_launch_ends_the_preparation_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        slow = Slow()
        async with lone_agent(tmp_path) as (agent, hub):
            with monkeypatch.context() as patch:
                _prepare_by(agent, slow.prepare, patch)
                hub.put(launch(program("echo", "old"), token="old"))
                await until(lambda: slow.begun)
            hub.put(launch(program("echo", "new"), token="new"))
            assert (await hub.ended()).exit_code == 0
            assert hub.lines == ["[prepare] begins", "new"]
            assert slow.cancelled == 1
            assert hub.states().count("exited") == 1

    run(scenario())


def test_preparation_that_fails_is_told_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, on_line: object, **__: object) -> Workspace:
        assert callable(on_line)
        on_line("[prepare] no such package")
        raise RuntimeError("a bug")

    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            _prepare_by(agent, fail, monkeypatch)
            hub.put(launch(program("true")))
            end = await hub.ended()
            assert end.exit_code == 1
            assert end.tail == ["[prepare] no such package"]
            assert end.error is not None
            assert "a bug" in json.dumps(end.error)

    run(scenario())


def test_failed_start_unlocks_its_environment(tmp_path: Path, machine: Machine) -> None:
    code = machine.send(r_DOT_txt="--no-index\n")
    spec = dataclasses.replace(
        program("true", code=code, requirements="r.txt"), launch=LaunchTable(secrets=["KEY"])
    )

    async def scenario() -> None:
        async with lone_agent(tmp_path / "agent") as (agent, hub):
            agent._machine.preparer = machine.preparer
            hub.put(launch(spec))
            end = await hub.ended()  # no hub answers when it asks for the secrets
            assert (end.exit_code, "environment of r.txt" in end.tail[-1]) == (1, True)

    run(scenario())
    (name,) = machine.kept("venvs")
    lock = FileLock(machine.home / "venvs" / f"{name}.lock")
    assert lock.try_lock(shared=False)
    lock.release()


def test_sandbox_is_tried_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            await agent.set_offer(Offer(), sandbox=Sandbox())
            hub.put(launch(program("true")))
            await hub.ended()
            assert threads
            assert threading.current_thread() not in threads

    def observed(*given: Any) -> None:
        threads.append(threading.current_thread())
        check_possible(*given)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(attempt_module, "check_possible", observed)
    run(scenario())


# ------------------------------------------------------------------------------ what is offered


def test_offer_is_told_and_told_again_when_the_hub_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            offer = Offer(cores=2.0)
            await agent.set_offer(offer)
            await until(lambda: hub.received == [Offering(offer)])
            hub.reconnect()
            await until(lambda: hub.received == [Offering(offer), Offering(offer)])
            assert agent.offer == offer

    run(scenario())


def test_offer_that_is_paused_ends_what_runs_until_it_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lone_agent(tmp_path) as (agent, hub):
            hub.put(launch(program("sh", "-c", "echo up; sleep 60")))
            await until(lambda: hub.lines)
            await agent.set_offer(Offer(paused="on battery"))
            assert agent.draining == "on battery"
            assert (await hub.ended()).exit_code == EXIT_LEFT
            await agent.set_offer(Offer())
            assert agent.draining == ""
            hub.put(launch(program("true"), member="w2", token="t2"))
            assert (await hub.ended("w2")).exit_code == 0

    run(scenario())
