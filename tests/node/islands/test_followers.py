"""Islands over several machines: formed, watched and ended together. Real processes, a real hub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import RankLost, ScriptError
from atoll.wire.limits import EXIT_LEFT
from tests.node.islands.island_machines import (
    RendezvousHub,
    all_here,
    kill,
    machines_of,
    rendezvous_hub,
)
from tests.node.launchers.ordering import run, until
from tests.patience import PATIENCE_S


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RendezvousHub]:
    with rendezvous_hub(tmp_path / "hub") as made:
        yield made


SHOWS = """
wait_for_all()
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "MASTER_ADDR", "ATOLL_MEMBER", "GLOO_SOCKET_IFNAME"]
print("told", *(os.environ[name] for name in names), flush=True)
"""


def test_ranks_of_all_machines_are_one_island(hub: RendezvousHub, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machines_of(hub, tmp_path, SHOWS) as machines:
            follower, leader = await machines.start("w1.1"), await machines.start("w1")
            assert (await leader.end()).code == 0
            await until(lambda: follower.said("waiting for the first machine of w1"))
            await until(lambda: follower.said("told ") == 2)  # lines may come after an end
            for first, one in ((0, leader), (2, follower)):
                told = sorted(line[line.index("told ") :] for line in one.lines if "told " in line)
                assert told == [
                    f"told {first + local} 4 {local} 2 {first // 2} 2 127.0.0.1 w1 lo"
                    for local in (0, 1)
                ]
            assert follower.said("[rank 3] told") == 1
            again = await machines.start("w1")
            assert (await again.end()).code == 0
            await until(lambda: follower.said("told ") == 4)
            await follower.process.stop(grace_s=PATIENCE_S)
            assert (await follower.end()).code == EXIT_LEFT

    run(scenario())


def test_a_late_follower_is_awaited_also_by_a_restarted_hub(
    hub: RendezvousHub, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with machines_of(hub, tmp_path, "wait_for_all()") as machines:
            leader = await machines.start("w1")
            with hub.as_process("w1.1") as client:
                await until(lambda: client.find_rendezvous(hub.job, "w1"))
            await asyncio.to_thread(hub.restart)
            follower = await machines.start("w1.1")
            assert (await leader.end()).code == 0
            await until(lambda: sorted(follower.ranks()) == [2, 3])

    run(scenario())


@pytest.mark.parametrize(
    "victim", ["rank of follower host", "follower host", "rank of leader", "leader"]
)
@pytest.mark.every(4)
def test_a_killed_process_ends_all_ranks_and_they_start_anew(
    hub: RendezvousHub, tmp_path: Path, victim: str
) -> None:
    script = f"""
wait_for_all()
if not os.path.exists({str(tmp_path / "again")!r}):
    time.sleep(3600)
"""

    async def scenario() -> None:
        async with machines_of(hub, tmp_path, script) as machines:
            follower, leader = await machines.start("w1.1"), await machines.start("w1")
            ranks = await all_here(follower, leader)
            pids = {"follower host": follower.process.pid, "leader": leader.process.pid}
            kill({**pids, "rank of follower host": ranks[3], "rank of leader": ranks[1]}[victim])
            ended = await leader.end()
            await until(lambda: not machines.living())
            check(victim, ended.code, str(ended.error))
            if victim == "follower host":
                await follower.end()
                follower = await machines.start("w1.1")
            (tmp_path / "again").touch()
            again = await machines.start("w1")
            assert (await again.end()).code == 0
            await until(lambda: sorted(follower.ranks()) == [2, 3])

    def check(victim: str, code: int, error: str) -> None:
        if victim == "rank of follower host":
            assert "rank 3 of the 4 of w1 (w1.1 on " in error
            assert "SIGKILL" in error
        elif victim == "rank of leader":
            assert "rank 1 of the 4 of w1 was killed" in error
        elif victim == "follower host":
            assert code == 1
            assert "a machine of an island is gone; given: w1.1 on " in error
            assert "with ranks 2 to 3 of 4" in error
        else:
            assert code == -9

    run(scenario())


@pytest.mark.usefixtures("all_ranks_end")
def test_the_error_of_a_remote_rank_is_the_cause(hub: RendezvousHub, tmp_path: Path) -> None:
    script = """
wait_for_all()
if rank == 2:
    time.sleep(0.3)
    raise ValueError("boom")
raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9")
"""

    async def scenario() -> None:
        async with machines_of(hub, tmp_path, script) as machines:
            await machines.start("w1.1")
            ended = await (await machines.start("w1")).end()
            assert isinstance(ended.error, ScriptError)
            assert not isinstance(ended.error, RankLost)
            assert "raised ValueError: boom" in ended.error.what
            assert "rank 2 of 4 (w1.1 on " in str(ended.error.given)

    run(scenario())


LEAVES = """
def leave(*_):
    open(os.path.join(shared, "leave"), "w").close()
signal.signal(signal.SIGTERM, leave if rank == 0 else signal.SIG_DFL)
wait_for_all()
print("ready", flush=True)
while not os.path.exists(os.path.join(shared, "leave")):
    time.sleep(0.02)
print("leaves", flush=True)
sys.exit(75 if rank == 0 else 0)
"""


@pytest.mark.parametrize("asked", ["leader", "follower host"])
@pytest.mark.every(2)
def test_island_leaves_as_one_whichever_machine_is_asked(
    hub: RendezvousHub, tmp_path: Path, asked: str
) -> None:
    script = f"shared = {str(tmp_path / 'shared')!r}\n" + LEAVES

    async def scenario() -> None:
        async with machines_of(hub, tmp_path, script) as machines:
            follower, leader = await machines.start("w1.1"), await machines.start("w1")
            both = {"follower host": follower, "leader": leader}
            await until(lambda: follower.said("ready") + leader.said("ready") == 4)
            await both[asked].process.stop(grace_s=PATIENCE_S)
            assert (await leader.end()).code == EXIT_LEFT
            # No rank was killed; lines may come after an end.
            await until(lambda: follower.said("leaves") + leader.said("leaves") == 4)
            await until(lambda: not machines.living())
            if asked == "leader":  # the follower host stays: its own agent ends it
                assert not follower.said("was asked")
                await follower.process.stop(grace_s=PATIENCE_S)
            assert (await follower.end()).code == EXIT_LEFT

    run(scenario())


def test_a_taken_port_starts_the_ranks_of_all_machines_anew(
    hub: RendezvousHub, tmp_path: Path
) -> None:
    script = f"""
wait_for_all()
once = {str(tmp_path / "once")!r}
if rank == 0 and not os.path.exists(once):
    open(once, "w").close()
    from atoll.errors import RankLost
    raise RankLost("no", given="code: -98, name: EADDRINUSE, message: address already in use")
if not os.path.exists(once):
    time.sleep(60)
"""

    async def scenario() -> None:
        async with machines_of(hub, tmp_path, script) as machines:
            follower, leader = await machines.start("w1.1"), await machines.start("w1")
            assert (await leader.end()).code == 0
            assert leader.said("was taken meanwhile") == 1
            await until(lambda: follower.said("here 3") == 2)

    run(scenario())
