"""The benchmark of the whole system against bare loops: what it asks for and how it counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from atoll.config.reading import parse_spec
from bench.pooled.groups import DIFFERENT, RELATED
from bench.rl.throughput import Bare, Observed, job_file, observed, summarised, without_end


@pytest.mark.parametrize("group", [RELATED, DIFFERENT], ids=lambda group: group.name)
def test_the_job_runs_what_the_bare_loops_run(group: Any) -> None:
    rl = without_end(group)
    assert parse_spec(job_file(rl)).rl == dataclasses.replace(rl, record=False)


def point(member: str, at: float, **values: float) -> dict[str, Any]:
    return {"time": at, "member": member, "values": values}


def lines() -> list[dict[str, Any]]:
    found = []
    for slot in range(1, 5):
        for at in range(11):
            found.append(
                point(
                    f"w{slot}", 100.0 + at, env_steps=500.0 + 100.0 * slot * at,
                    queue_wait_s=0.1 * at, value_age_s=1.0,
                )
            )  # fmt: skip
    return [*found, point("w0", 105.0, update_s=0.2, updates=3.0)]


def result(role: str, **more: Any) -> dict[str, Any]:
    message = {"role": role, "staleness": {}, "dropped": {}, "env_steps": 0, "sent_bytes": 0}
    return {**message, **more}


def test_rates_span_each_policys_first_and_last_point() -> None:
    results = [
        result("critic", staleness={"0": 7, "2": 1}, dropped={"stale": 2}, sent_bytes=10**9),
        *[result("actor", env_steps=1_000, sent_bytes=40_000) for _ in range(4)],
    ]
    rl = without_end(DIFFERENT)
    seen = observed(rl, lines(), results, cores=2.0)
    assert list(seen.steps_per_s.values()) == [100.0, 200.0, 300.0, 400.0]
    assert seen.per_cpu_s == 500.0
    assert seen.queue_wait == pytest.approx(0.1)
    assert seen.bytes_per_step == 40.0  # of actors, not the critic's weights
    assert (seen.staleness, seen.dropped) == ({"0": 7, "2": 1}, {"stale": 2})
    assert seen.update_s == [0.2]


def test_a_policy_that_reported_nothing_is_no_zero() -> None:
    silent = [line for line in lines() if line["member"] != "w3"]
    with pytest.raises(TimeoutError, match="pendulum reported 0 times"):
        observed(without_end(DIFFERENT), silent, [], cores=1.0)


def test_ratio_is_the_median_over_pairs_of_summed_rates() -> None:
    def pair(system: float) -> Any:
        seen = Observed(
            steps_per_s={"a": system, "b": 50.0}, per_cpu_s=90.0, queue_wait=0.0,
            value_age_s=[0.1, 0.3],
            update_s=[0.01], bytes_per_step=20.0, staleness=Counter({"1": 3}), dropped=Counter(),
        )  # fmt: skip
        return Bare({"a": 100.0, "b": 100.0}, 100.0), seen

    summary = summarised([pair(100.0), pair(150.0), pair(140.0)])
    assert summary["ratio_cpu"] == 0.9
    assert (summary["ratio"], summary["ratio_range"]) == (0.95, [0.75, 1.0])
    assert summary["steps_per_s"]["a"] == {"system": 140, "bare": 100}
    assert summary["staleness"] == {"1": 9}
    assert summary["value_age_s"] == {"p50": 0.3, "p99": 0.3}
