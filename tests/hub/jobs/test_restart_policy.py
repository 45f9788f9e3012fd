"""When a missing member is launched again, and what a resumed job may change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.config import parse_spec
from atoll.errors import ConfigError
from atoll.hub.jobs.completion import (
    AWAY_S,
    LAST_RETURN_S,
    MAX_FAILURES,
    RETURN_S,
    RestartPolicy,
    missing,
    pause_s,
    restarts_exhausted,
)
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.jobs.record import check_spec_change
from atoll.hub.rounds.runtime import restore_runtimes
from atoll.hub.rounds.store import SCHEMA, RoundStore
from atoll.hub.stores import Stores, open_stores
from atoll.rounds.effects import Decided, Planned
from atoll.wire.messages import Lease, RoundJoin, RoundPlan, Verdict
from atoll.wire.states import MemberState

SPEC = '[job]\nname = "toy"\nnodes = 2\n'


def lost(state: str = "lost", *, failures: int = 0, exit_code: int | None = None) -> Member:
    return Member(
        member="w0", slot=0, node="n", state=MemberState(state), failures=failures,
        exit_code=exit_code, incarnation="i",
    )  # fmt: skip


def test_missing_slots_are_those_without_a_living_process() -> None:
    members = {"w0": lost(), "w1": lost("running")}
    assert missing(
        Job(job="j", created=0.0, spec=parse_spec("[job]\nnodes = 3"), members=members)
    ) == [0, 2]


def test_pauses_double_to_a_minute() -> None:
    assert [pause_s(n) for n in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert pause_s(30) == 60.0


def test_member_is_given_up_after_too_many_launches() -> None:
    job = Job(job="j", created=0.0)
    assert not restarts_exhausted(lost("failed", failures=MAX_FAILURES - 2), job)
    assert restarts_exhausted(lost("failed", failures=MAX_FAILURES - 1), job)
    assert not restarts_exhausted(lost("left", failures=MAX_FAILURES - 1), job)


def test_failing_program_backs_off_then_is_given_up() -> None:
    member = lost("failed", exit_code=1)
    member.error = {"kind": "OutOfMemory", "what": "w0 ran out of memory"}
    job = Job(job="j", created=0.0, spec=parse_spec("[job]\nretries = 2"))
    waits = []
    for member.retried in range(2):
        clock = VirtualClock()
        relaunches = RestartPolicy(clock=clock)
        assert not restarts_exhausted(member, job)
        while not relaunches.due("j", member, node_is_there=True, may_return=False, program=True):
            clock.advance(0.5)
        waits.append(clock.monotonic() - VirtualClock().monotonic())
    assert waits == [1.0, 2.0]
    member.retried = 2
    assert restarts_exhausted(member, job)


def test_silent_process_may_live_on_while_its_node_is_away() -> None:
    clock = VirtualClock()
    relaunches = RestartPolicy(clock=clock)
    member = lost()
    member.incarnation = ""

    def due() -> bool:
        return relaunches.due("j", member, node_is_there=False, may_return=False, silent=True)

    assert not due()
    clock.advance(AWAY_S + 0.1)
    assert due()


@pytest.mark.parametrize(
    ("member", "node_is_there", "may_return", "wait_s"),
    [
        (lost(), True, False, RETURN_S),
        (lost(), False, False, 0.0),
        (lost(), False, True, LAST_RETURN_S),
        (lost(exit_code=-9), True, True, 0.0),
        (lost("failed", exit_code=1, failures=2), True, False, 2.0),
        (lost("left"), True, False, 1.0),
    ],
)
def test_who_may_come_back_is_waited_for(
    member: Member, wait_s: float, *, node_is_there: bool, may_return: bool
) -> None:
    clock = VirtualClock()
    relaunches = RestartPolicy(clock=clock)

    def due() -> bool:
        return relaunches.due("j", member, node_is_there=node_is_there, may_return=may_return)

    assert due() == (wait_s == 0.0)
    clock.advance(max(0.0, wait_s - 0.01))
    assert due() == (wait_s == 0.0)
    clock.advance(0.02)
    assert due()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ('[data]\ncorpus = "files:*.md"\n', "data"),
        ('[model]\nname = "gpt"\nlayers = 9\n', "model"),
        ("[job]\nseed = 9\n", "seed"),
    ],
)
def test_what_the_state_is_made_of_cannot_change(change: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_spec_change(parse_spec(""), change)


def test_nodes_and_strategy_can_change() -> None:
    text = '[job]\nnodes = 5\n[strategy]\npreset = "ddp"\n'
    assert check_spec_change(parse_spec(""), text).job.nodes == 5


def test_verdict_that_was_not_stored_is_not_believed(tmp_path: Path) -> None:
    """A record that says more than the book of rounds is put right: no member got a verdict."""

    async def work() -> None:
        clock = VirtualClock()
        stores: Stores = await open_stores(
            tmp_path / "data", jobs_dir=tmp_path / "jobs", clock=clock, schemas=[SCHEMA]
        )
        try:
            job = await stores.jobs.create(SPEC, files={})
            book = RoundStore(database=stores.database, jobs=stores.jobs, clock=clock)
            cursors = {0: {"offset": 5}}
            plan = RoundPlan(job.job, 0, 1, ["w0"], "alone")
            await book.add_plan(Planned(plan))
            verdict = Verdict(0, 1, True, "d", ["w0"], leases={"w0": Lease(0, {"offset": 5})})
            await book.add_verdict(job.job, Decided(plan, verdict, 1.0, cursors), nbytes=0)
            assert (await book.cursors_at(job.job, 1)) == cursors
            joins = {"w0": RoundJoin(1, "b", lease=Lease(0, {"offset": 9}))}
            open_plan = RoundPlan(job.job, 1, 2, ["w0"], "alone")
            await book.add_plan(Planned(open_plan, joins))
            await stores.jobs.update(job.job, committed_round=2, leases={0: {"offset": 9}})
            (room,) = await restore_runtimes(
                job, store=book, now=0.0, fresh=False, first_grace_s=1.0
            )
            assert room.machine.committed_round == 1
            assert room.machine.commit_log.data_slots.cursors == cursors
            assert room.machine.attempt is not None
            assert room.machine.attempt.joins == joins
            assert stores.jobs.get(job.job).committed_round == 1
        finally:
            await stores.close()

    asyncio.run(asyncio.wait_for(work(), 20.0))
