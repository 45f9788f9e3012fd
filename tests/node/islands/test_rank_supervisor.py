"""Islands: ranks of one member, started, watched and ended together. Real processes, no torch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from atoll.config import (
    RankPlace,
    rank_environment,
    rank_place,
    supervised_place,
)
from atoll.errors import OutOfMemory, RankLost, ScriptError
from atoll.node.launchers.launcher import Exit
from atoll.wire.limits import EXIT_LEFT
from tests.node.islands.local_ranks import (
    all_here,
    island_of,
    none_lives,
    rank_of,
    started,
    to_end,
)
from tests.node.launchers.ordering import run, until
from tests.patience import PATIENCE_S

# --------------------------------------------------------------------------------- a good run


def test_ranks_have_torchruns_variables_and_marked_lines(tmp_path: Path) -> None:
    script = """
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ATOLL_MEMBER"]
port = int(os.environ["MASTER_PORT"])
print(" ".join(os.environ[n] for n in names), port > 1023, os.environ["OMP_NUM_THREADS"])
print("10 %\\r20 %\\rno end of line", end="")
"""
    ended, lines = run(to_end(island_of(script, ranks=3), tmp_path))
    assert (ended.code, ended.error) == (0, None)
    said = [line for line in lines if "127.0.0.1" in line]
    expected = [f"{r} 3 {r} 3 127.0.0.1 w1 True 1" for r in range(3)]
    assert sorted(said, key=lambda line: line[-30:]) == [
        expected[0], f"[rank 1] {expected[1]}", f"[rank 2] {expected[2]}",
    ]  # fmt: skip
    assert {"[rank 1] 10 %", "[rank 1] 20 %", "[rank 1] no end of line"} <= set(lines)


def test_port_is_free_for_the_first_rank_and_nobody_else_gets_it(tmp_path: Path) -> None:
    script = """
import socket
port = int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            print("held")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
        print("heard", server.accept()[0].recv(9).decode())
else:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=60).sendall(b"hello")
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
"""
    ended, lines = run(to_end(island_of(script), tmp_path))
    assert ended.code == 0, ended.tail
    assert {"held", "heard hello"} <= set(lines)


def test_port_that_was_taken_meanwhile_is_no_failure(tmp_path: Path) -> None:
    script = """
if rank == 0 and not os.path.exists("once"):
    open("once", "w").close()
    from atoll.errors import RankLost
    raise RankLost("no", given="code: -98, name: EADDRINUSE, message: address already in use")
print("port", os.environ["MASTER_PORT"])
"""
    ended, lines = run(to_end(island_of(script), tmp_path))
    assert ended.code == 0, ended.tail
    assert sum(line.startswith("port") for line in lines) == 1


def test_rank_of_somebody_elses_program_is_none_of_an_island() -> None:
    place = RankPlace(1, 4, local_rank=1, address="127.0.0.1", port=4711, local_ranks=2)
    assert supervised_place(place.variables()) is None
    assert rank_place(place.variables()) == place
    assert place.dial == "127.0.0.1:4711"
    assert RankPlace(0, 1, local_rank=0, address="fd00::7", port=1).dial == "[fd00::7]:1"
    environment = rank_environment(
        place, defaults={"A": "1", "B": "1"}, environment={"B": "2", "RANK": "9"}, C="3"
    )
    assert supervised_place(environment) == place
    assert [environment[name] for name in "ABC"] == ["1", "2", "3"]


# --------------------------------------------------------------------------- a rank that dies


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.every(3)
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, victim: int) -> None:
    async def scenario() -> Exit:
        async with started(island_of("time.sleep(3600)", ranks=3), tmp_path) as (process, lines):
            found = await all_here(lines, ranks=3)
            os.kill(found[victim], signal.SIGKILL)
            ended = await asyncio.wait_for(process.wait(), PATIENCE_S)
            await none_lives(found)
            return ended

    ended = run(scenario())
    assert ended.code == 128 + signal.SIGKILL
    assert type(ended.error).__name__ == "JobError"
    assert f"rank {victim} of the 3 of w1 was killed" in rank_of(ended)
    assert "SIGKILL" in rank_of(ended)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.every(2)
@pytest.mark.usefixtures("all_ranks_end")
def test_rank_that_raises_is_named_and_not_those_that_lost_touch(
    tmp_path: Path, victim: int
) -> None:
    script = f"""
wait_for_all()
if rank == {victim}:
    time.sleep(0.2)  # the others notice first, as when it unwinds slowly
    raise ValueError("boom")
raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9")
"""
    ended, _ = run(to_end(island_of(script, ranks=3), tmp_path))
    assert ended.code == 1
    assert isinstance(ended.error, ScriptError)
    assert "raised ValueError: boom" in ended.error.what
    assert f"rank {victim} of 3" in str(ended.error.given)


def test_rank_that_a_library_aborts_says_where_it_was(tmp_path: Path) -> None:
    script = "def deep(): os.abort()\nwait_for_all()\nif rank == 1: deep()\ntime.sleep(60)"
    ended, lines = run(to_end(island_of(script), tmp_path))
    assert ended.code == 128 + signal.SIGABRT
    assert "rank 1 of the 2 of w1 was killed" in rank_of(ended)
    assert any("[rank 1] Fatal Python error: Aborted" in line for line in lines)
    assert any("[rank 1]" in line and "in deep" in line for line in lines), lines


def test_ranks_that_time_out_are_no_fault_of_the_program(tmp_path: Path) -> None:
    script = "raise RuntimeError('[/x/gloo/transport/tcp/pair.cc:9] Timed out waiting 100ms')"
    ended, _ = run(to_end(island_of(script), tmp_path))
    assert isinstance(ended.error, RankLost)
    assert "Timed out waiting" in str(ended.error.given)


def test_rank_out_of_memory_is_called_that(tmp_path: Path) -> None:
    script = "wait_for_all()\nif rank == 1: x = bytearray(10**18)\ntime.sleep(60)"
    ended, _ = run(to_end(island_of(script), tmp_path))
    assert isinstance(ended.error, OutOfMemory)
    assert "rank 1 of 2" in str(ended.error.given)


def test_what_a_rank_started_is_not_left_behind(tmp_path: Path) -> None:
    script = """
child = subprocess.Popen(["sleep", "60"])
print(f"here {rank + 10} {child.pid}", flush=True)
wait_for_all()
if rank == 1:
    os._exit(3)
time.sleep(60)
"""

    async def scenario() -> Exit:
        async with started(island_of(script), tmp_path) as (process, lines):
            found = await all_here(lines, ranks=4)
            ended = await process.wait()
            await none_lives(found)
            return ended

    ended = run(scenario())
    assert "rank 1 of the 2 of w1 ended with exit status 3" in rank_of(ended)


# -------------------------------------------------------------------------------- being ended


LEAVES = f"""
def leave(*_):
    open("leave", "w").close()
signal.signal(signal.SIGTERM, leave if rank == 0 else signal.SIG_DFL)
wait_for_all()
print("ready", flush=True)
while not os.path.exists("leave"):
    time.sleep(0.02)
sys.exit({EXIT_LEFT} if rank == 0 else 0)
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.every(2)
def test_rank_0_is_asked_to_leave_and_its_status_counts(tmp_path: Path, stopped: bool) -> None:
    async def scenario() -> Exit:
        async with started(island_of(LEAVES), tmp_path) as (process, lines):
            found = await all_here(lines)
            await until(lambda: sum("ready" in line for line in lines) == 2)
            if stopped:
                os.kill(found[1], signal.SIGSTOP)
            await process.stop(grace_s=PATIENCE_S)
            ended = await process.wait()
            await none_lives(found)
            return ended

    ended = run(scenario())
    assert ended.code == EXIT_LEFT
    assert not any("was killed" in line for line in ended.tail)


@pytest.mark.parametrize("stubborn", [0, 1])
@pytest.mark.every(2)
def test_rank_that_does_not_leave_is_killed_after_the_grace(tmp_path: Path, stubborn: int) -> None:
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == {stubborn} else signal.SIG_DFL)
print("ready", flush=True)
time.sleep(3600)
"""

    async def scenario() -> None:
        async with started(island_of(script), tmp_path) as (process, lines):
            found = await all_here(lines)
            await until(lambda: sum("ready" in line for line in lines) == 2)
            await process.stop(grace_s=0.5)
            await asyncio.wait_for(process.wait(), PATIENCE_S)
            await none_lives(found)

    run(scenario())


def test_ranks_die_with_their_supervisor(tmp_path: Path) -> None:
    async def scenario() -> Exit:
        async with started(island_of("time.sleep(60)", ranks=3), tmp_path) as (process, lines):
            found = await all_here(lines, ranks=3)
            os.kill(process.pid, signal.SIGKILL)
            ended = await process.wait()
            await none_lives(found)
            return ended

    assert run(scenario()).code == -signal.SIGKILL


# -------------------------------------------------------------------------- a rank stays away

WAITS = """
from pathlib import Path
from atoll.island.start_phase import StartPhase, StartReport
start = StartReport(Path(os.environ["ATOLL_DIRECTORY"]), rank=rank)
if rank == {late}:
    time.sleep(3600)
start.enter(StartPhase.{phase})
open(f"entered-{{rank}}", "w").close()
while not all(os.path.exists(f"entered-{{r}}") for r in range(3) if r != {late}):
    time.sleep(0.01)
raise RuntimeError("Timed out waiting for another rank")
"""


@pytest.mark.parametrize(
    ("late", "phase", "text"),
    [
        (1, "MEETING", "rank 1 is behind; ranks 0, 2: meeting the other ranks; rank 1: loading"),
        (3, "DIVIDING", "no rank is ahead, they wait for each other; ranks 0, 1, 2: dividing"),
    ],
)
def test_a_rank_that_stays_away_at_the_start_is_named(
    tmp_path: Path, late: int, phase: str, text: str
) -> None:
    command = island_of(WAITS.format(late=late, phase=phase), ranks=3, timeout_s=20.0)
    ended, _ = run(to_end(command, tmp_path))
    assert ended.code == 1
    assert isinstance(ended.error, RankLost)
    assert "did not begin together" in ended.error.what
    assert text in str(ended.error)
    assert "timeout_s = 20" in str(ended.error)
