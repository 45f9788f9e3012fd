"""The process that plans: what it may take of the hub's machine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from atoll.errors import ConfigError, LimitReached
from atoll.hub.planning import planner as planner_module
from atoll.hub.planning.planner import (
    LAW_FILE,
    MOST_OF_ONE,
    MOST_OF_OTHERS,
    MOST_WAITING,
    NICENESS,
    Planner,
)
from atoll.hub.security.auth import Identity


def test_plans_do_not_take_the_processor_from_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.name != "posix":
        pytest.skip("priorities of processes are of POSIX")
    program = "import os; print('{\"nice\": %d}' % os.nice(0))"
    monkeypatch.setattr(planner_module, "COMMAND", (sys.executable, "-c", program))
    answer = Planner(data=tmp_path, torch=True).ask("", [{"node": "box", "state": "online"}])
    assert asyncio.run(answer)["nice"] == min(19, os.nice(0) + NICENESS)


def test_machines_that_left_are_not_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys, json; print(json.dumps({'got': json.load(sys.stdin)['nodes']}))"
    monkeypatch.setattr(planner_module, "COMMAND", (sys.executable, "-c", program))
    planner = Planner(data=tmp_path, torch=True)
    rows = [{"node": state, "state": state} for state in ("online", "lost", "left")]
    assert asyncio.run(planner.ask("", rows))["got"] == rows[:1]
    with pytest.raises(ConfigError, match="no machine is online"):
        asyncio.run(planner.ask("", rows[1:]))


def test_another_scaling_law_gives_another_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_module, "COMMAND", (sys.executable, "-c", "print('{}')"))
    planner = Planner(data=tmp_path, torch=True)
    started = []
    for law in ("one", "one", "other"):
        (tmp_path / LAW_FILE).write_text(law)
        asyncio.run(planner.ask("", [{"node": "box", "state": "online"}]))
        started.append(planner.started)
    assert started == [1, 1, 2]


def test_viewers_leave_places_for_operators_and_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is answered before standard input ends: all that are let in wait."""
    program = "import sys; sys.stdin.read(); print('{}')"
    monkeypatch.setattr(planner_module, "COMMAND", (sys.executable, "-c", program))
    planner = Planner(data=tmp_path, torch=True)
    viewers = [Identity("viewer", f"viewer{number}") for number in range(MOST_OF_OTHERS)]
    operator = Identity("operator", "owner")

    async def refused(by: Identity, number: int) -> bool:
        try:
            await planner.ask(f"plan {number}", [{"node": "box", "state": "online"}], by=by)
        except LimitReached:
            return True
        return False

    async def everybody() -> list[int]:
        requests = [(viewers[0], 10), *((viewer, 3) for viewer in viewers[1:]), (operator, 10)]
        async with asyncio.TaskGroup() as group:
            tasks_of = [
                [group.create_task(refused(by, 100 * which + number)) for number in range(count)]
                for which, (by, count) in enumerate(requests)
            ]
            itself = group.create_task(
                planner.ask("the hub's own", [{"node": "box", "state": "online"}])
            )
        assert itself.result() == {}
        return [sum(not one.result() for one in tasks) for tasks in tasks_of]

    let_in = asyncio.run(everybody())
    assert let_in == [
        MOST_OF_ONE,
        MOST_OF_OTHERS - MOST_OF_ONE,
        0,
        0,
        MOST_WAITING - MOST_OF_OTHERS,
    ]
    assert (
        asyncio.run(planner.ask("later", [{"node": "box", "state": "online"}], by=viewers[0])) == {}
    )
