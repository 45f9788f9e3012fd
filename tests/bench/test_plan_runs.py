"""Which trials of `bench.plan` count."""

from __future__ import annotations

from typing import Any

from atoll.forecast.candidates import Candidate
from atoll.forecast.predict import Planner
from atoll.forecast.ranking import rank
from bench.plan.__main__ import again, row_of, summary
from bench.plan.labs import draw, tried, workload
from bench.plan.runs import Seen, seen, whole_periods


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


def test_a_first_choice_that_was_not_done_is_not_replaced() -> None:
    drawn = draw(1)
    found = rank(Planner(workload()), drawn.fleet, only=tuple(tried(drawn))).forecasts
    rows = [row_of(one, Seen(one.step_s, one.sent_bytes, 10)) for one in found]
    lab = {"seed": 1, "load": 0.0}
    labs = [again({**lab, "rows": rows}), again({**lab, "rows": rows[1:]})]
    assert [one["of_best"] for one in labs] == [1.0, None]
    figures = summary(labs)
    assert (figures["labs"], figures["first_not_done"]) == (2, 1)
    assert (figures["picked_best"], figures["worst_of_best"]) == (1.0, 1.0)
