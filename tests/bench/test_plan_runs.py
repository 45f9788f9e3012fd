"""Which trials of `bench.plan` count."""

from __future__ import annotations

from typing import Any

from atoll.forecast.candidates import Candidate
from atoll.forecast.predict import Planner
from bench.plan.labs import draw, workload
from bench.plan.runs import seen, whole_periods


def lines(steps: int, *, every: int, members: int, alone_from: int) -> list[dict[str, Any]]:
    found = []
    for step in range(1, steps + 1):
        there = (1 if step >= alone_from else members) if step % every == 0 else 0
        line = {"trial": 0, "step": step, "seconds": 0.5 * step, "sent": 100 * (step // every)}
        found.append({**line, "contributors": there})
    return found


def test_a_trial_that_has_lost_a_member_does_not_count() -> None:
    drawn = draw(1)
    names = tuple(machine.name for machine in drawn.fleet.machines)
    candidate = Candidate(preset="diloco", members=names, codec="fp32", options={"every": 10})
    forecast = Planner(workload()).predict(drawn.fleet, candidate)
    warm, steps = whole_periods(forecast)

    def of_all(*, alone_from: int) -> dict[str, list[dict[str, Any]]]:
        one = lines(steps, every=10, members=len(names), alone_from=alone_from)
        return {f"w{number}": one for number in range(len(names))}

    found = seen(of_all(alone_from=steps + 1), 0, forecast)
    assert found is not None
    assert (found.step_s, found.sent_bytes, found.steps) == (0.5, 10.0, steps - warm)
    assert seen(of_all(alone_from=steps), 0, forecast) is None
