"""Containers of a real daemon: started, listened to, limited, ended, removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.config import LaunchTable
from atoll.errors import AtollError, ConfigError, OutOfMemory, ScriptError
from atoll.node.launchers import available, container
from atoll.node.launchers.container import ContainerLauncher, ContainerProcess
from atoll.node.launchers.launcher import OOM_SCORE, Exit, ResourceCaps, parse_mounts
from atoll.wire.messages import Launch
from tests.containers.conftest import SMALL
from tests.containers.daemons import Daemon
from tests.node.launchers.ordering import command_launch, make_order, run, until
from tests.patience import PATIENCE_S, PROMPT_S

MEMORY = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes || cat /sys/fs/cgroup/memory.max"
MB = 2**20


def shell(text: str, **launch: Any) -> Launch:
    table = LaunchTable(launcher="container", **{"image": SMALL, **launch})
    return command_launch("/bin/sh", "-c", text, launch=table)


async def start(
    command: Launch,
    root: Path,
    on_line: Callable[[str], None],
    *,
    caps: ResourceCaps | None = None,
    allowed: list[str] | None = None,
) -> ContainerProcess:
    order = make_order(command, root, caps=caps, allowed=allowed)
    return await ContainerLauncher(home=root, node="n").start(order, on_line)


def to_end(text: str, root: Path, lines: list[str] | None = None, **more: Any) -> Exit:
    launch = {key: more.pop(key) for key in list(more) if key not in ("caps", "allowed")}
    on_line = ([] if lines is None else lines).append

    async def scenario() -> Exit:
        process = await start(shell(text, **launch), root, on_line, **more)
        return await process.wait()

    return run(scenario())


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: Daemon) -> Any:
    yield
    assert daemon.names() == []


def test_daemon_that_answers_is_told(daemon: Daemon) -> None:
    assert available() == ["process", "container"]


def test_program_gets_variables_and_its_folder_at_the_same_path(
    tmp_path: Path, daemon: Daemon
) -> None:
    lines: list[str] = []
    text = "echo hello $ATOLL_JOB $ATOLL_MEMBER $COLOUR; echo $PWD; echo kept > result"
    ended = to_end(text, tmp_path, lines, env=["COLOUR=blue"])
    folder = tmp_path / "job-1" / "w1"
    assert ended == Exit(0, None, lines)
    assert lines == ["hello job-1 w1 blue", str(folder)]
    assert (folder / "result").read_text() == "kept\n"
    assert (folder / "output.log").read_text().splitlines() == lines


def test_program_is_not_root_and_can_become_nothing_else(tmp_path: Path, daemon: Daemon) -> None:
    lines: list[str] = []
    to_end("id -u; cat /proc/self/status", tmp_path, lines)
    assert int(lines[0]) > 0
    status = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"


def test_failed_program_shows_status_and_last_lines(tmp_path: Path, daemon: Daemon) -> None:
    ended = to_end("echo last words; exit 7", tmp_path)
    assert (ended.code, ended.tail) == (7, ["last words"])
    assert isinstance(ended.error, ScriptError)
    assert "exit status 7" in ended.error.what


def test_lines_come_while_the_program_runs(tmp_path: Path, daemon: Daemon) -> None:
    text = "echo first; while ! cat go 2>/dev/null; do sleep 0.05; done; echo second"

    async def scenario() -> list[str]:
        lines: list[str] = []
        process = await start(shell(text), tmp_path, lines.append)
        await until(lambda: lines == ["first"])
        (tmp_path / "job-1" / "w1" / "go").touch()
        assert (await process.wait()).code == 0
        return lines

    assert run(scenario()) == ["first", "second"]


def test_limits_are_the_kernels(tmp_path: Path, daemon: Daemon) -> None:
    lines: list[str] = []
    caps = ResourceCaps(cpus=(0,), cores=0.5, threads=1, memory_bytes=64 * MB)
    show = "cat /proc/self/oom_score_adj; cat /proc/self/status; echo threads $OMP_NUM_THREADS"
    text = f"{MEMORY}; {show}"
    assert to_end(text, tmp_path, lines, caps=caps).code == 0
    assert lines[:2] == [str(64 * MB), str(OOM_SCORE)]
    assert "Cpus_allowed_list:\t0" in lines
    assert lines[-1] == "threads 1"


def test_program_above_its_memory_limit_is_killed(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "CAUSE_TRIES", int(PATIENCE_S / container.CAUSE_S))
    caps = ResourceCaps(memory_bytes=32 * MB, memory_from="the job's needs")
    ended = to_end("exec tail /dev/zero", tmp_path, caps=caps)
    assert isinstance(ended.error, OutOfMemory), ended
    for words in ("w1", "0.03 GB", "the job's needs"):
        assert words in str(ended.error)


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_asks_and_kills_after_the_grace(
    tmp_path: Path, daemon: Daemon, stubborn: bool
) -> None:
    act = "" if stubborn else "echo bye; exit 3"

    async def scenario() -> tuple[Exit, float, list[str]]:
        lines: list[str] = []
        text = f"trap '{act}' TERM; echo up; while true; do sleep 0.05; done"
        process = await start(shell(text), tmp_path, lines.append)
        await until(lambda: lines)
        begun = time.monotonic()
        await process.stop(grace_s=0.5 if stubborn else 120.0)
        return await process.wait(), time.monotonic() - begun, lines

    ended, took_s, lines = run(scenario())
    assert ended.code == (-9 if stubborn else 3)
    assert lines == (["up"] if stubborn else ["up", "bye"])
    assert took_s < PROMPT_S


def test_root_may_be_read_only_while_its_folder_and_tmp_are_not(
    tmp_path: Path, daemon: Daemon
) -> None:
    lines: list[str] = []
    text = "touch here /tmp/there && echo yes; touch /new 2>/dev/null || echo no"
    to_end(text, tmp_path, lines, read_only=True)
    assert lines == ["yes", "no"]


def test_folder_that_the_owner_allows_is_there_for_reading(tmp_path: Path, daemon: Daemon) -> None:
    data = tmp_path / "data" / "set"
    data.mkdir(parents=True)
    (data / "a").write_text("content\n")
    lines: list[str] = []
    text = "cat /input/a; touch /input/b 2>/dev/null || echo no"
    mounts, allowed = [f"{data}:/input:ro"], [str(tmp_path / "data")]
    to_end(text, tmp_path, lines, mounts=mounts, allowed=allowed)
    assert lines == ["content", "no"]
    assert parse_mounts(mounts, allowed=allowed)[0].source == data


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"image": "absent:1", "pull": "never"}, "must not be pulled"),
        ({"image": "127.0.0.1:9/absent:1"}, "cannot be pulled"),
        ({"network": "bridge"}, "cannot reach this hub"),
    ],
)
def test_what_cannot_start_says_why(
    tmp_path: Path, daemon: Daemon, launch: dict[str, Any], words: str
) -> None:
    with pytest.raises(AtollError, match=words):
        to_end("true", tmp_path, **launch)


def test_program_that_the_image_lacks_is_the_jobs_own_fault(tmp_path: Path, daemon: Daemon) -> None:
    table = LaunchTable(launcher="container", image=SMALL)

    async def scenario() -> Exit:
        launch = command_launch("no-such-program", launch=table)
        return await (await start(launch, tmp_path, print)).wait()

    try:
        ended = run(scenario())
    except ConfigError as error:  # without an init process, which would start first
        ended = Exit(127, ScriptError(str(error)), [str(error)])
    assert ended.code == 127
    assert isinstance(ended.error, ScriptError)
    assert "no-such-program" in " ".join(ended.tail)


def test_container_that_fails_for_memory_of_all_is_killed(tmp_path: Path, daemon: Daemon) -> None:
    async def scenario() -> tuple[int | None, Exit]:
        lines: list[str] = []
        process = await start(shell("echo up; sleep 60"), tmp_path, lines.append)
        await until(lambda: lines)
        pid = process.pid
        process.fail(OutOfMemory("together too much"))
        return pid, await process.wait()

    pid, ended = run(scenario())
    assert pid is not None
    assert isinstance(ended.error, OutOfMemory)
    assert ended.code == -9


def test_only_containers_of_the_same_home_are_removed(tmp_path: Path, daemon: Daemon) -> None:
    async def scenario() -> tuple[list[int], Exit]:
        lines: list[str] = []
        own = ContainerLauncher(home=tmp_path, node="n")
        process = await own.start(make_order(shell("echo up; sleep 60"), tmp_path), lines.append)
        await until(lambda: lines)
        other = ContainerLauncher(home=tmp_path / "other", node="n")
        later = ContainerLauncher(home=tmp_path, node="n")
        removed = [await asyncio.to_thread(one.remove_orphans) for one in (own, other, later)]
        return removed, await process.wait()

    removed, ended = run(scenario())
    assert removed == [0, 0, 1]
    assert ended.code != 0


def test_daemon_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert available() == ["process"]
    with pytest.raises(AtollError, match="no daemon for containers answers"):
        asyncio.run(start(shell("true"), tmp_path, print))
