"""The planner: what it predicts is the code's own accounting, and it says why it chose."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from atoll.errors import ConfigError, PlanError
from atoll.fleet.fleet import Fleet
from atoll.forecast.candidates import Candidate, SearchSpace, candidates
from atoll.forecast.efficiency import gain_of
from atoll.forecast.predict import Forecast, Planner
from atoll.forecast.ranking import Ranking, progress, rank
from atoll.methods.table import PRESETS
from atoll.strategies.measured_traffic import measure_traffic
from tests.forecast.worlds import fleet, workload


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(workload())


FEW = SearchSpace(presets=("ddp", "diloco", "streaming-diloco"), every=(25, 100))


def ranked(planner: Planner, machines: Fleet) -> Ranking:
    return rank(planner, machines, space=FEW)


def diloco(*members: str, route: str = "relay", every: int = 50) -> Candidate:
    return Candidate(
        preset="diloco", members=members, codec="feedback(int8)", route=route,
        options={"every": every, "shared_steps": 0},
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["ddp", "diloco", "streaming-diloco", "powersgd"])
@pytest.mark.parametrize("route", ["relay", "direct"])
def test_bytes_are_those_of_the_strategy_itself(planner: Planner, preset: str, route: str) -> None:
    machines = fleet(0.5, 0.5, 0.5)
    names = tuple(m.name for m in machines.machines)
    options = {"every": 50} if preset.endswith("diloco") else {}
    one = Candidate(preset=preset, members=names, codec=PRESETS[preset].codec, route=route,
                    options=options)  # fmt: skip
    found = planner.predict(machines, one)
    steps = 1000
    resolved = one.resolved(steps=steps)
    traffic = measure_traffic(resolved, elements=1_000_000, peers=3, steps=steps)
    expected = traffic.relay_sent_bytes if route == "relay" else traffic.direct_sent_bytes
    shared = getattr(resolved.method, "shared_steps", 0)  # in which nothing is sent
    assert found.sent_bytes == pytest.approx(expected / (steps - shared), rel=0.02)


@pytest.mark.parametrize(("shared_steps", "every"), [(170, 100), (2000, 100), (0, 3000)])
def test_rounds_are_as_far_apart_as_the_job_says(shared_steps: int, every: int) -> None:
    planner = Planner(dataclasses.replace(workload(), steps=100_000))
    one = diloco("m0", "m1", "m2", every=every)
    options = {"every": every, "shared_steps": shared_steps}
    found = planner.predict(fleet(0.5, 0.5, 0.5), dataclasses.replace(one, options=options))
    plain = planner.predict(fleet(0.5, 0.5, 0.5), diloco("m0", "m1", "m2"))
    assert found.every == every
    assert found.sent_bytes * every == pytest.approx(plain.sent_bytes * 50, rel=0.001)


def test_slower_members_do_fewer_steps_and_none_waits(planner: Planner) -> None:
    found = planner.predict(fleet(0.5, 1.0, 0.5), diloco("m0", "m1", "m2"))
    assert found.shares == {"m0": 1.0, "m1": 0.5, "m2": 1.0}
    assert found.compute_s == pytest.approx(0.5, rel=0.02)
    every = Candidate(preset="ddp", members=("m0", "m1", "m2"), codec="fp32")
    assert planner.predict(fleet(0.5, 1.0, 0.5), every).compute_s == pytest.approx(1.0)


def test_a_round_beside_training_costs_nothing_if_it_fits(planner: Planner) -> None:
    def streaming(delay: int) -> Forecast:
        options = {"every": 40, "delay": delay}
        one = Candidate(preset="streaming-diloco", members=("m0", "m1"), options=options)
        return planner.predict(fleet(0.05, 0.05), one)

    late, soon = streaming(9), streaming(1)
    assert late.waiting_s == 0 < soon.waiting_s
    assert late.round_s == pytest.approx(soon.round_s)


@pytest.mark.parametrize("change", [{"up_mbps": 100.0}, {"latency_ms": 5.0}, {"step_s": 0.2}])
def test_progress_never_falls_with_a_better_machine(
    planner: Planner, change: dict[str, float]
) -> None:
    machines = fleet(0.3, 0.5, 0.4)
    better = machines.with_machines(
        dataclasses.replace(m, **change)  # type: ignore[arg-type]
        for m in machines.machines
    )
    before, after = (progress(ranked(planner, one).best) for one in (machines, better))
    assert after >= before


def test_a_further_machine_never_makes_the_choice_worse(planner: Planner) -> None:
    speeds = [0.5, 0.5, 2.5, 0.5, 0.4]
    found = [progress(ranked(planner, fleet(*speeds[:n])).best) for n in range(1, 6)]
    assert found == sorted(found)


def test_on_hopeless_lines_one_machine_alone_is_better(planner: Planner) -> None:
    machines = fleet(0.05, 0.4, up_mbps=0.05, down_mbps=0.05, latency_ms=300)
    ranking = ranked(planner, machines)
    assert ranking.best.candidate == Candidate(preset="alone", members=("m0",), codec="fp32")
    assert ranking.reasons[0] == "one machine alone is better: m0"
    assert any("compute 0.12 times as much" in reason for reason in ranking.reasons)


def test_without_known_lines_nothing_is_called_better(planner: Planner) -> None:
    machines = fleet(0.05, 0.05, up_mbps=0.0, down_mbps=0.0, latency_ms=0.0)
    apart = machines.with_machines(dataclasses.replace(m, site="") for m in machines.machines)
    ranking = ranked(planner, apart)
    (reason,) = ranking.reasons
    assert reason == "only m0 alone can be predicted: see what was left out, and why"
    assert "the line of m0, m1 is not known" in ranking.left_out[0]


def test_a_step_faster_than_its_machine_is_a_contradiction(planner: Planner) -> None:
    machine = dataclasses.replace(fleet(0.1).machines[0], step_s=1e-4, gflops=1.0)
    ground = planner.workload.step_on(machine).ground
    assert "1 GFLOP/s need" in ground
    assert "one of both is wrong" in ground
    slower = dataclasses.replace(machine, step_s=1e3)
    assert planner.workload.step_on(slower).ground == "measured"


def test_the_machine_that_hurts_is_named(planner: Planner) -> None:
    machines = fleet(0.1, 0.1, 0.1).changed("m2", up_mbps=0.1, down_mbps=0.1)
    every = Candidate(preset="ddp", members=("m0", "m1", "m2"), codec="fp32", route="relay")
    reasons = rank(planner, machines, only=[every]).reasons
    assert any(reason.startswith("m2 hurts: without it") for reason in reasons)


def test_a_machine_too_small_for_the_model_is_left_out() -> None:
    planner = Planner(workload(needs_bytes=8 * 10**9))
    machines = fleet(0.5, 0.5, 0.5).changed("m1", memory_gb=4.0)
    ranking = ranked(planner, machines)
    assert "m1" not in ranking.best.candidate.members
    assert any("does not fit the memory" in line for line in ranking.left_out)
    with pytest.raises(PlanError, match="does not fit the memory"):
        ranked(planner, fleet(0.5, 0.5, memory_gb=1.0))


def test_without_a_line_only_what_needs_none_is_planned(planner: Planner) -> None:
    machines = fleet(0.5, 0.5, up_mbps=0.0, down_mbps=0.0)
    ranking = ranked(planner, machines)
    assert ranking.best.candidate.alone
    assert any("the line of m0, m1 is not known" in line for line in ranking.left_out)


def test_a_machine_without_speed_is_refused(planner: Planner) -> None:
    with pytest.raises(PlanError, match="the speed of a machine is not known: m0"):
        ranked(planner, fleet(0.0))


def test_an_estimated_speed_says_so_and_widens(planner: Planner) -> None:
    machines = fleet(0.0, 0.0, gflops=50.0)
    found = planner.predict(machines, diloco("m0", "m1"))
    assert "estimated from 50 GFLOP/s" in found.grounds[0]
    assert found.step_high_s > 2 * found.step_s > 4 * found.step_low_s


def test_every_candidate_passes_the_rules_of_jobs() -> None:
    found = list(candidates(fleet(0.5, 0.5, 0.5), steps=400, optimizer="sgd", space=FEW))
    assert len(found) > 12
    assert len(set(found)) == len(found)
    assert {one.options.get("every") for one in found if one.preset == "diloco"} == {25, 100}


def test_a_gain_falls_with_the_interval_and_stays_in_its_bounds() -> None:
    gains = [gain_of("diloco", every=n, delay=0, codec="fp32") for n in (1, 10, 50, 200, 900)]
    assert [one.middle for one in gains] == sorted((one.middle for one in gains), reverse=True)
    assert all(0 <= one.low <= one.middle <= one.high <= 1 for one in gains)
    assert "nothing was measured" in gains[-1].ground


def test_unknown_members_are_refused(planner: Planner) -> None:
    with pytest.raises(ConfigError, match="unknown machine of the fleet"):
        planner.predict(fleet(0.5, 0.5), diloco("m0", "m7"))


def test_a_delayed_result_cuts_the_period_of_a_slow_member() -> None:
    machines = fleet(0.1, 0.23, up_mbps=1000, down_mbps=1000, latency_ms=1)
    names = tuple(machine.name for machine in machines.machines)
    load, found = workload(steps=2000), []
    for delay in (0, 4):
        candidate = Candidate(
            preset="streaming-diloco", members=names, codec="feedback(int8)", route="relay",
            options={"every": 20, "fragments": 4, "delay": delay, "shared_steps": 0},
        )  # fmt: skip
        found.append(Planner(load).predict(machines, candidate))
    # 13/32 of 5 steps are 2; of 4 and of 1 they are 2 and 1, because no member does none.
    assert found[0].compute_s == pytest.approx(0.1)
    assert found[1].compute_s == pytest.approx(3 * 0.23 / 5)
    assert found[1].waiting_s == 0.0


def test_what_is_to_be_pasted_is_toml() -> None:
    options = {"every": 10, "delay": "auto", "nesterov": True, "outer_lr": 0.7}
    candidate = Candidate(preset="diloco", members=("m0", 'm"1'), options=options)
    assert tomllib.loads(candidate.toml()) == {
        "job": {"nodes": 2, "route": "relay", "on": ["m0", 'm"1']},
        "strategy": {"preset": "diloco", **options},
    }


@pytest.mark.parametrize("preset", ["sparseloco", "sparta"])
def test_a_method_of_which_nothing_is_measured_is_refused(planner: Planner, preset: str) -> None:
    machines = fleet(0.5, 0.5)
    candidate = Candidate(preset=preset, members=("m0", "m1"))
    with pytest.raises(ConfigError, match=f"nothing was measured.*{preset}"):
        planner.predict(machines, candidate)
