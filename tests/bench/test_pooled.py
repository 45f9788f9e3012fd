"""The benchmark of pooled critics: what it keeps, how it counts, what it draws."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.methods.ledger import Ledger
from bench.pooled import __main__ as program
from bench.pooled import learning
from bench.pooled.drawing import averaged, draw
from bench.pooled.groups import DIFFERENT, GROUPS, RELATED, VARIANTS, Group, Task
from bench.pooled.learning import Drawn, learn, settings
from bench.pooled.page import BEGIN, END, cell, with_tables
from bench.pooled.results import Found, figures, interval, judged, printed, steps_to

TASKS = [
    Task(name="a", env="CartPole-v1", target=100.0, steps=1_000),
    Task(name="b", env="CartPole-v1", target=100.0, steps=1_000),
]
GROUP = Group(name="related", tasks=TASKS, seeds=2)
TINY = Group(
    name="related",
    tasks=[dataclasses.replace(task, steps=128) for task in TASKS],
    changes={"environments": 4, "rollout": 16, "epochs": 1, "critic_epochs": 1},
)


def record(variant: str, seed: int, *, reached: tuple[int, int], end: float = 150.0) -> Any:
    """Return a run that reaches both targets after so many steps; 0: never."""
    curves = {}
    for name, steps in zip("ab", reached, strict=True):
        curves[name] = [
            [at, None if at == 100 else (end if steps and at >= steps else 50.0)]
            for at in range(100, 1_100, 100)
        ]
    return {**program.record_of((GROUP, variant, seed)), "curves": curves, "seconds": 1.0}


# ------------------------------------------------------------------------------ the groups


@pytest.mark.parametrize("group", GROUPS.values(), ids=list(GROUPS))
def test_a_group_has_four_tasks_and_five_seeds(group: Group) -> None:
    rl = group.tables("pooled")
    assert len(group.tasks) == 4
    assert group.seeds >= 5
    for task in group.tasks:
        assert task.steps % (rl.rollout * rl.environments) == 0


def test_variants_differ_by_their_critic_alone() -> None:
    for group in (RELATED, DIFFERENT):
        own = group.tables("own")
        for variant in VARIANTS:
            found = group.tables(variant)
            assert dataclasses.replace(found, critic="own") == own


def test_runs_with_other_numbers_are_other_runs() -> None:
    changed = dataclasses.replace(GROUP, changes={"lr": 0.5})
    longer = GROUP.shortened(2_000)
    words = {GROUP.digest(), changed.digest(), longer.digest()}
    assert len(words) == 3
    assert GROUP.digest() == Group(name="related", tasks=TASKS).digest()


def test_stable_baselines_is_given_the_same_numbers() -> None:
    rl = RELATED.tables("sb3")
    given = settings(rl, rl.policies[0])
    assert given["n_steps"] * rl.environments == given["batch_size"] * rl.minibatches
    assert given["total_timesteps"] == RELATED.tasks[0].steps
    assert (given["gamma"], given["n_epochs"]) == (rl.gamma, rl.epochs)


# ------------------------------------------------------------------------------ the runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_a_point_per_rollout_for_every_task(variant: str) -> None:
    curves = learn(TINY, variant, seed=0)
    assert list(curves) == ["a", "b"]
    for points in curves.values():
        assert [steps for steps, _ in points] == [64, 128]
    assert curves == learn(TINY, variant, seed=0)


def test_only_failed_runs_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []

    def once(group: Group, variant: str, *, seed: int) -> dict[str, list[learning.Point]]:
        calls.append((variant, seed))
        if len(calls) == 1:
            raise RuntimeError("no")
        return {task.name: [(100, None)] for task in group.tasks}

    monkeypatch.setattr(program, "learn", once)
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        runs = program.plan([GROUP], ["pooled", "own"], seeds=1)
        program.fill(Ledger(path), runs, deadline=math.inf)
    assert calls == [("pooled", 0), ("own", 0), ("pooled", 0)]
    assert "FAILED: RuntimeError: no" in capsys.readouterr().err


def test_five_seeds_of_every_group_precede_a_sixth() -> None:
    runs = list(program.plan([RELATED, DIFFERENT], VARIANTS, seeds=0))
    order = [(group.name, seed) for group, variant, seed in runs if variant == "own"]
    fives = [(name, seed) for name in ("related", "different") for seed in range(5)]
    assert order == [*fives, *(("related", seed) for seed in range(5, 10))]
    assert len(runs) == 4 * len(order)


def test_a_group_may_have_some_of_the_variants_only() -> None:
    group = dataclasses.replace(GROUP, variants=("own", "pooled"), seeds=1)
    runs = program.plan([group], VARIANTS, seeds=0)
    assert [variant for _, variant, _ in runs] == ["pooled", "own"]


def test_no_run_begins_after_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = program.plan([GROUP], ["pooled"], seeds=1)
    program.fill(Ledger(tmp_path / "rows.jsonl"), runs, deadline=-math.inf)
    assert "time is up" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_mean_needs_twenty_episodes() -> None:
    drawn = Drawn()
    drawn.add(64, [1.0] * 19)
    drawn.add(128, [3.0, 3.0])
    assert drawn.points == [(64, None), (128, 1.2)]


# ------------------------------------------------------------------------------ the figures


def test_steps_to_target_count_to_the_first_mean_above_it() -> None:
    curve: list[Any] = [[64, None], [128, 99.0], [192, 100.0], [256, 50.0], [320, 200.0]]
    assert steps_to(100.0, curve) == 192
    assert steps_to(201.0, curve) is None


def test_interval_of_ten_seeds_has_nine_degrees_of_freedom() -> None:
    values = [float(n) for n in range(10)]
    found = interval(values)
    deviation = math.sqrt(sum((v - 4.5) ** 2 for v in values) / 9)
    assert found.mean == 4.5
    assert found.high - 4.5 == pytest.approx(2.262 * deviation / math.sqrt(10), rel=2e-3)


def test_the_ratio_is_the_geometric_mean_over_tasks_and_seeds() -> None:
    records = [
        record("pooled", 0, reached=(200, 400)), record("own", 0, reached=(400, 400)),
        record("pooled", 1, reached=(300, 300)), record("own", 1, reached=(300, 600)),
    ]  # fmt: skip
    found = figures(Found(GROUP, records))["pooled"]["steps_over_own"]
    assert found["mean"] == pytest.approx(0.5**0.5, abs=1e-4)
    assert found["low"] == pytest.approx(found["high"], abs=1e-4)  # both seeds say the same
    assert found["seeds"] == 2


def test_run_that_misses_the_target_counts_all_its_steps() -> None:
    records = [record("own", seed, reached=(0, 500)) for seed in range(2)]
    told = figures(Found(GROUP, records))["own"]["tasks"]
    assert told["a"]["missed"] == 2
    assert told["a"]["steps_to_target"]["mean"] == 1_000
    assert (told["b"]["missed"], told["b"]["steps_to_target"]["mean"]) == (0, 500)


def test_run_with_few_episodes_has_no_return_but_is_json() -> None:
    short = record("own", 0, reached=(0, 500))
    short["curves"]["a"] = [[100, None], [200, None]]
    told = figures(Found(GROUP, [short]))["own"]["tasks"]["a"]
    assert told["final_return"]["mean"] is told["mean_return"]["mean"] is None
    assert "NaN" not in json.dumps(told)
    assert cell(told["final_return"], digits=0) == "-"


@pytest.mark.parametrize(("pooled", "holds"), [(300, True), (390, True), (410, False)])
def test_the_claim_on_related_tasks_is_judged_by_the_mean_ratio(pooled: int, holds: bool) -> None:
    results = {"related": {"pooled": {"steps_over_own": {"mean": pooled / 500, "low": 0.1}}}}
    claim = judged(results)[0]
    assert claim["holds"] is holds


def test_no_worse_means_that_the_interval_reaches_one() -> None:
    def holds(low: float | None) -> Any:
        ratio = {"mean": 1.2, "low": low, "high": 1.5}
        return judged({"different": {"pooled": {"steps_over_own": ratio}}})[2]["holds"]

    assert [holds(0.9), holds(1.1), holds(None)] == [True, False, None]


def test_what_was_not_run_is_not_judged() -> None:
    assert [claim["holds"] for claim in judged({})] == [None] * 5


def test_json_has_a_line_per_task_and_variant(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.jsonl")
    for variant in VARIANTS:
        for seed in range(2):
            ledger.add(record(variant, seed, reached=(200 + 100 * seed, 400)))
    ledger.add({**record("own", 7, reached=(0, 0)), "kind": "pooled-of-other-numbers"})
    result = json.loads(json.dumps(program.result_of(ledger, [GROUP]), allow_nan=False))
    assert set(result["related"]) == set(VARIANTS)
    assert result["related"]["own"]["seeds"] == 2
    rows = printed([GROUP], result)
    assert [(row["variant"], row["task"]) for row in rows][:3] == [
        ("pooled", "a"), ("pooled", "b"), ("own", "a"),
    ]  # fmt: skip


def test_only_the_tables_of_a_page_are_replaced() -> None:
    records = [record(v, s, reached=(200, 400)) for v in ("pooled", "own") for s in range(2)]
    results = {"related": figures(Found(GROUP, records))}
    result = {**results, "claims": judged(results)}
    page = f"# Title\n{BEGIN}\nold\n{END}\nrest\n"
    once = with_tables(page, [GROUP], result)
    assert once.startswith("# Title\n")
    assert once.endswith("\nrest\n")
    assert "old" not in once
    assert "| related | own | 2 | b (100) | 400 (400 to 400) | 0 | 150.0 (150.0 to 150.0) |" in once
    assert "| 1.00 (1.00 to 1.00), 2 seeds |" in once
    assert with_tables(once, [GROUP], result) == once


def test_curves_are_averaged_where_every_seed_has_one() -> None:
    curves: list[Any] = [[[500, None], [1_000, 10.0]], [[500, 4.0], [1_000, 20.0]]]
    steps, means, errors = averaged(curves, 1_000)
    assert (steps, means) == ([1_000.0], [15.0])
    assert errors[0] == pytest.approx(5.0)


def test_figure_is_reproducible_and_names_all_variants(tmp_path: Path) -> None:
    group = dataclasses.replace(RELATED, seeds=2)
    records = []
    for variant in VARIANTS:
        for seed in range(2):
            curves = {t.name: [[100, None], [t.steps, 10.0 + seed]] for t in group.tasks}
            row = program.record_of((group, variant, seed))
            records.append({**row, "curves": curves, "seconds": 0.0})
    found = Found(group, records)
    for name in ("one.svg", "two.svg"):
        draw(found, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert all(f">{variant}</text>" in drawn for variant in VARIANTS)
