"""Transitions of a member's state: which may follow which, and that one module writes them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.errors import ConfigError, HubError
from atoll.hub.jobs.members import MAX_TAIL, MAX_TEXT, MAX_TEXTS, Members
from atoll.hub.stores import Stores
from atoll.wire.states import MemberState, ProcessPhase
from tests.hub.durable import SPEC, with_stores

HUB = Path(__file__).resolve().parents[3] / "atoll" / "hub"

ENDS = "done failed lost left stopped"

MAY_FOLLOW = {
    "assigned": f"assigned starting running {ENDS}",
    "starting": f"starting running {ENDS}",
    "running": f"running {ENDS}",
    "lost": f"assigned running {ENDS}",
    "left": "assigned done failed stopped",
    "stopped": "assigned done failed stopped",
    "failed": "assigned failed stopped",
    "done": "assigned stopped",
}


async def leave(members: Members, job: str) -> None:
    await members.update(job, "w0", leaving=True)
    await members.lost(job, "w0", why="its machine goes away")


MOVES: dict[str, Callable[[Members, str], Awaitable[object]]] = {
    "assigned": lambda m, job: m.assign(job, member="w0", slot=0, node="n1"),
    "starting": lambda m, job: m.launched(job, "w0", ProcessPhase.STARTING),
    "running": lambda m, job: m.connected(job, "w0", incarnation="i"),
    "done": lambda m, job: m.finished(job, "w0", ok=True, result={}, error=None),
    "failed": lambda m, job: m.finished(job, "w0", ok=False, result={}, error={"what": "x"}),
    "lost": lambda m, job: m.lost(job, "w0", why="its node is gone"),
    "left": leave,
    "stopped": lambda m, job: m.stopped(job, "w0"),
}


def test_only_allowed_transitions_take(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        jobs = stores.jobs
        job = (await jobs.create(SPEC, files={})).job
        await jobs.members.assign(job, member="w0", slot=0, node="n0")
        for before, after in itertools.product(MemberState, MOVES):
            member = jobs.get(job).members["w0"]
            member.state, member.leaving = before, False
            if after in MAY_FOLLOW[before].split():
                await MOVES[after](jobs.members, job)
                assert jobs.get(job).members["w0"].state == after, (before, after)
            else:
                with pytest.raises(HubError, match=f"{before} -> {after}"):
                    await MOVES[after](jobs.members, job)
                assert member.state == before

    assert MOVES.keys() == set(MemberState)
    with_stores(tmp_path, test)


def test_an_exit_code_decides_the_state_of_the_end(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        jobs = stores.jobs
        job = (await jobs.create(SPEC, files={})).job
        for code, stopping, state in [
            (0, False, "done"),
            (1, False, "failed"),
            (1, True, "stopped"),
        ]:
            await jobs.members.assign(job, member="w0", slot=0, node="n0")
            await jobs.update(job, stopping=stopping)
            assert await jobs.members.exited(job, "w0", code) == state
        jobs.members.reset(job)
        assert jobs.get(job).members["w0"].state == "stopped"

    with_stores(tmp_path, test)


def test_a_state_is_no_field_that_update_can_change(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        job = (await stores.jobs.create(SPEC, files={})).job
        await stores.jobs.members.assign(job, member="w0", slot=0, node="n0")
        with pytest.raises(ConfigError, match="'state'"):
            await stores.jobs.members.update(job, "w0", state=MemberState.DONE)

    with_stores(tmp_path, test)


def writes(path: Path) -> set[str]:
    """Return how a file changes a member's state or makes a record of a member."""
    text = path.read_text(encoding="utf-8")
    found = {"UPDATE jobs"} if "UPDATE jobs" in text else set[str]()
    for node in ast.walk(ast.parse(text)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        for target in flat:
            if isinstance(target, ast.Attribute) and target.attr == "state":
                found.add(f"{ast.unparse(target.value)}.state")
        if isinstance(node, ast.Call):
            states = [k for k in node.keywords if k.arg == "state"]
            if any("MemberState" in ast.unparse(k.value) for k in states):
                found.add("state=MemberState")
            if ast.unparse(node.func) == "Member":
                found.add("Member()")
    return found


def test_no_other_module_writes_the_state_of_a_member() -> None:
    found = {str(path.relative_to(HUB)): writes(path) for path in HUB.rglob("*.py")}
    assert {name: kinds for name, kinds in found.items() if kinds} == {
        "jobs/members.py": {"process.state", "Member()"},
        "jobs/jobs.py": {"record.state", "job.state", "UPDATE jobs"},  # of the job
        "queues/nats_items.py": {"item.state"},
        "queues/nats_leases.py": {"item.state"},
    }


def test_words_of_a_failure_are_cut(tmp_path: Path) -> None:
    """The record of a job is written as a whole with every change, and shown to everybody."""

    async def test(stores: Stores) -> None:
        jobs = stores.jobs
        job = (await jobs.create(SPEC, files={})).job
        await jobs.members.assign(job, member="w0", slot=0, node="n0")
        error = {"what": "x" * 10**6, **{str(number): "y" for number in range(1_000)}}
        await jobs.members.finished(job, "w0", ok=False, result={}, error=error)
        member = await jobs.members.update(job, "w0", tail=["z" * 10**6] * 1_000)
        assert member.error is not None
        assert member.error["what"] == "x" * MAX_TEXT
        assert len(member.error) == MAX_TEXTS
        assert member.tail == ["z" * MAX_TEXT] * MAX_TAIL

    with_stores(tmp_path, test)
