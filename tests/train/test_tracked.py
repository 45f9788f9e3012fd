"""Training that agrees with no other is measured all the same: `run.track`."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from atoll.clock import Clock, VirtualClock
from atoll.config import LogTable
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.task import Task
from atoll.train.results import script_meter
from atoll.train.results.metrics import Recorder
from atoll.wire.messages import Event, Point


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Point | Event]:
    """Return what is reported to the hub, from now on."""
    received: list[Point | Event] = []

    def to_list(task: Task, *, clock: Clock, **_: object) -> Recorder:
        return Recorder(task, clock=clock, report=received.append, announce=received.append)

    monkeypatch.setattr(script_meter, "Recorder", to_list)
    return received


def test_tracked_points_carry_steps_and_logged_values(
    reported: list[Point | Event], tmp_path: Path
) -> None:
    clock = VirtualClock()
    run = Run(SingleGroup(), Membership(tmp_path), clock=clock)
    with run:
        run.track(nn.Linear(2, 1))
        run.tell("episode", "here it is")
        for number in range(4):
            run.log(tokens=5, value=float(number), sent_bytes=100.0 * number)
            run.stepped(10)
            clock.advance(0.6)
        run.stepped(0)
        run.results["rl"] = {"role": "actor"}
    (event,) = [one for one in reported if isinstance(one, Event)]
    assert (event.kind, event.text) == ("episode", "here it is")
    points = [one for one in reported if isinstance(one, Point)]
    assert points[0].values == {"parameters": 3.0}
    assert points[1].values["process_began"] == 1.0
    assert [(p.step, p.values.get("value")) for p in points[2:]] == [
        (30, 2.0),
        (40, 3.0),
        (40, None),
    ]
    assert points[-1].values["sent_bytes"] == 300.0
    assert points[-1].values["tokens"] == 20
    result = run._result()
    assert (result["rl"], result["steps"], result["sent_bytes"]) == ({"role": "actor"}, 40, 300.0)


def test_a_model_without_parameters_can_be_tracked(tmp_path: Path) -> None:
    with Run(SingleGroup(), Membership(tmp_path)) as run:
        run.track(nn.ModuleDict())
        run.stepped()
        assert run.step == 1


def test_a_failure_at_the_end_closes_the_loggers(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    run = Run(SingleGroup(), Membership(tmp_path, log=LogTable(to=["csv"])))
    run.__enter__()
    run.track(nn.Linear(2, 1))
    run.stepped()
    run.finish = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run.__exit__(None, None, None)
    (file,) = tmp_path.rglob("metrics.csv")
    assert "parameters" in file.read_text(encoding="utf-8"), "the file is closed"
