"""The benchmark of all methods: what it keeps, how it judges, what it draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.methods.table import PRESETS
from atoll.strategies.measured_traffic import measure_traffic
from bench.methods import index, modelled, tables
from bench.methods.__main__ import plan
from bench.methods.comparing import compare
from bench.methods.ledger import Ledger
from bench.methods.modelled import Clock
from bench.methods.rows import ROWS
from bench.methods.running import Trial, run
from bench.methods.setting import FULL, QUICK, Setting
from bench.methods.shapes import SHAPES, Interval, judge
from bench.methods.table import make_rows, printed

TINY = Setting(layers=1, width=16, context=16, batch=2, steps=12, held_out_tokens=1_024)


def record(row: str, loss: float, *, members: int = 4, seed: int = 0, **more: Any) -> Any:
    return {
        "kind": "run", "row": row, "strategy": row, "codec": "fp32", "members": members,
        "seed": seed, "steps": 600, "scale": FULL.scale, "parameters": 9, "tokens_per_node": 100,
        "loss": loss,
        "sent_bytes": 1_000, "received_bytes": 1_000, "rounds": 2, "peak_bytes": 500,
        "exchanges": [[500, 500, 2]], "identical": True, "seconds": 1.0, **more,
    }  # fmt: skip


# ------------------------------------------------------------------------------ the rows


def test_rows_have_names_of_their_own_and_presets_that_exist() -> None:
    names = [row.name for row in ROWS]
    assert sorted(names) == sorted(set(names))
    replicas = {name for name, preset in PRESETS.items() if preset.inner == "local"}
    assert {row.preset for row in ROWS} == replicas


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_row_builds(row: Any) -> None:
    trial = Trial(row, row.members[0], 0, FULL)
    assert trial.resolved().build() is not None
    assert FULL.table(row.train).steps == FULL.steps


def test_every_shape_names_rows_that_are_run_with_several_seeds() -> None:
    core = {row.name for row in ROWS if row.core}
    for shape in SHAPES:
        assert set(shape.rows) <= core


def test_the_plan_has_every_run_and_first_what_shapes_need() -> None:
    trials = list(plan(ROWS, members=[4, 8, 16], seeds=3, setting=FULL))
    keys = [(trial.row.name, trial.members, trial.seed) for trial in trials]
    assert len(set(keys)) == 3 * sum(len(row.members) for row in ROWS)
    core = sum(row.core for row in ROWS)
    assert all(trial.row.core and trial.seed == 0 for trial in trials[:core])


# --------------------------------------------------------------------------- one short run


def test_a_run_counts_what_its_strategy_says_and_repeats_itself() -> None:
    trial = Trial(next(row for row in ROWS if row.name == "local-sgd"), 2, 3, TINY)
    first, second = run(trial), run(trial)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    expected = measure_traffic(trial.resolved(), elements=first["parameters"], peers=2, steps=12)
    assert first["sent_bytes"] == expected.relay_sent_bytes
    assert first["identical"]
    assert sum(sent * count for sent, _, count in first["exchanges"]) + 128 == first["sent_bytes"]


@pytest.mark.parametrize("name", ["alone", "local-sgd", "diloco/int8"])
def test_methods_equal_their_references(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    found = compare(Trial(row, row.members[0], 0, QUICK))
    assert "tests/reference" in found["against"]
    assert found["first_deviation"] < 1e-5


def test_methods_without_reference_equal_their_suites_formula() -> None:
    row = next(row for row in ROWS if row.name == "streaming")
    found = compare(Trial(row, 4, 0, QUICK))
    assert "formula" in found["against"]
    assert found["deviation"] < 1e-5


# ------------------------------------------------------------------------------- on images

PICTURES = Setting(
    name="resnet", layers=1, width=8, batch=4, steps=12, held_out_tokens=200, data="segments"
)


def test_a_method_on_images_counts_images_and_accuracy() -> None:
    trial = Trial(next(row for row in ROWS if row.name == "local-sgd"), 2, 3, PICTURES)
    first, second = run(trial), run(trial)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["tokens_per_node"] == 12 * 4
    assert first["identical"]
    (row,) = make_rows([first], [], clock=Clock())
    assert row["accuracy"] == round(first["accuracy"], 4)
    assert first["accuracy"] * 200 == pytest.approx(round(first["accuracy"] * 200))
    assert printed([row])[0]["accuracy"] == row["accuracy"]


def test_a_method_on_images_equals_its_reference() -> None:
    row = next(row for row in ROWS if row.name == "diloco")
    found = compare(Trial(row, 2, 0, PICTURES))
    assert "tests/reference" in found["against"]
    assert found["first_deviation"] < 1e-5


@pytest.mark.parametrize(
    ("name", "data"), [("gpt", "fashion-mnist"), ("resnet", "stdlib")], ids=["images", "text"]
)
def test_a_model_is_not_trained_on_what_it_cannot_take(name: str, data: str) -> None:
    with pytest.raises(SystemExit, match=f"a {name} is not trained on {data}"):
        Setting(name=name, data=data)


# ------------------------------------------------------------------------------ the ledger


def test_ledger_survives_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ledger = Ledger(path)
    ledger.add(record("ddp", 1.0))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "run", "row": "dil')
    again = Ledger(path)
    assert record("ddp", 2.0) in again
    assert record("diloco", 1.0) not in again
    again.add(record("diloco", 1.0))
    assert [each["row"] for each in Ledger(path)] == ["ddp", "diloco"]
    assert len(Ledger(path).of("run", steps=600, scale=FULL.scale)) == 2


# ------------------------------------------------------------------------------ the clock


def test_wall_time_is_compute_plus_exposed_communication() -> None:
    clock = Clock(step_s=0.1, round_trip_s=0.5)
    exchanges = [[1_000_000, 250_000, 3]]
    plain = clock.wall_s(exchanges, steps=100, rate_bps=10e6)
    assert plain == pytest.approx(10 + 3 * (0.5 + 1.0))
    hidden = clock.wall_s(exchanges, steps=100, rate_bps=10e6, overlap=10)
    assert hidden == pytest.approx(10 + 3 * 0.5)
    assert clock.wall_s(exchanges, steps=100, rate_bps=10e6, overlap=100) == pytest.approx(10)


@pytest.mark.parametrize(
    ("preset", "codec", "late_bytes"),
    [("diloco", "fp32", 2**18), ("diloco", "int4", 4_000_000), ("d-psgd", "fp32", 4_000_000)],
)
def test_a_mean_comes_down_while_the_rest_goes_up(preset: str, codec: str, late_bytes: int) -> None:
    clock, exchanges = Clock(step_s=0.1, round_trip_s=0.5), [[4_000_000, 4_000_000, 1]]
    found = clock.wall_s(
        exchanges, steps=10, rate_bps=8e6, codec=modelled.codec_of_means(preset, codec)
    )
    assert found == pytest.approx(1 + 0.5 + 4 + late_bytes / 1e6)
    gathered = clock.wall_s([[1_000_000, 3_000_000, 1]], steps=10, rate_bps=8e6, codec=codec)
    assert gathered == pytest.approx(1 + 0.5 + 4)


# ------------------------------------------------------------------------------ the shapes


def test_an_interval_is_students() -> None:
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.30 / 3**0.5, rel=1e-3)
    assert Interval.of([1.0]).plain() == {"mean": 1.0, "low": None, "high": None, "seeds": 1}


def test_claims_are_judged_on_differences_within_a_seed() -> None:
    records = [record("alone", 2.0 + s, members=1, seed=s) for s in range(3)]
    records += [record("diloco", 1.8 + s, seed=s) for s in range(3)]
    found = {each["claim"]: each for each in judge(records)}
    claim = found["one node alone is worse than DiLoCo"]
    assert claim["holds"] is True
    assert claim["figures"]["alone over diloco"]["seeds"] == 3
    assert found["int8 costs less than 0.5 %"]["holds"] is None
    assert found["int8 costs less than 0.5 %"]["note"] == "not measured"


def test_a_claim_that_does_not_come_out_says_so() -> None:
    records = [record("diloco", 1.0), record("diloco/int8", 1.02)]
    found = {each["claim"]: each for each in judge(records)}["int8 costs less than 0.5 %"]
    assert found["holds"] is False
    assert "does not come out" in found["note"]


def test_the_rows_of_the_table_have_what_was_asked_for() -> None:
    rows = make_rows([record("ddp", 1.0), record("ddp", 1.2, seed=1)], [], clock=Clock())
    (row,) = rows
    assert row["loss"] == 1.1
    assert row["loss_interval"][0] < 1.1 < row["loss_interval"][1]
    assert row["bytes_per_node_per_token"] == 10.0
    assert row["peak_bytes"] == 500
    assert set(row["wall_s"]) == {"10 Mbit/s", "100 Mbit/s", "1 Gbit/s"}
    json.dumps(rows)


def test_a_wall_time_that_was_measured_replaces_the_modelled_one() -> None:
    wall = {"row": "ddp", "members": 4, "link": "100 Mbit/s", "wall_s": 12.0}
    runs = [record("ddp", 1.0), record("ddp", 1.0, members=8)]
    four, eight = (
        printed([row])[0] for row in make_rows(runs, [], clock=Clock(step_s=0.1), walls=[wall])
    )
    assert [four[name] for name in ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")] == [
        "~60 s", "12 s", "~60 s",
    ]  # fmt: skip
    assert eight["100 Mbit/s"] == "~60 s"


def test_larger_groups_are_compared_with_the_same_seeds() -> None:
    records = [
        record(row, loss * (1 + seed), members=members, seed=seed)
        for row, losses in (("diloco", (2.0, 1.0)), ("diloco/int8", (2.2, 1.5)))
        for members, loss in zip((8, 16), losses, strict=True)
        for seed in (0, 1)
    ]
    records += [record("alone", 3.0, members=1), record("muloco", 1.0, members=8)]
    page = f"before\n{tables.BEGIN_GROUPS}\nold\n{tables.END}\nafter\n"
    made = tables.with_groups(page, make_rows(records, [], clock=Clock()), records)
    rows = {line.split(" | ")[0]: line for line in made.splitlines()}
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert "old" not in made
    assert "| 8 members | over `diloco` | 16 members | over `diloco` |" in made
    assert rows["| diloco/int8"].count("+10.0 % (10.0 to 10.0)") == 1
    assert rows["| diloco/int8"].count("+50.0 % (50.0 to 50.0)") == 1
    assert rows["| alone"].count("3.000") == 2
    assert rows["| muloco"].endswith("| -50.0 % |  |  |")
    assert "| int8 costs less than 0.5 % |" not in made, "that is said of four members"
    assert tables.with_groups(made, make_rows(records, [], clock=Clock()), records) == made


# ------------------------------------------------------------------------ figures and index


def test_figures_are_small_reproducible_and_keep_text(tmp_path: Path) -> None:
    plots = pytest.importorskip("bench.methods.plots", reason="needs matplotlib")
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    records = [record(name, 1.0 + n / 50) for n, name in enumerate(PRESETS)]
    rows = make_rows(records, [], clock=Clock())
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        plots.draw(rows, ["diloco"], path, title="diloco")
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert len(one) < 30_000
    assert b">diloco</text>" in one


def test_a_figure_is_put_at_the_end_of_a_page_once(tmp_path: Path) -> None:
    plots = pytest.importorskip("bench.methods.plots", reason="needs matplotlib")
    page = tmp_path / "diloco.md"
    page.write_text("# DiLoCo\n\nWords.\n", encoding="utf-8")
    for words in ("first", "second"):
        plots.place(page, tmp_path / "figures" / "diloco.svg", words=words)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# DiLoCo\n\nWords.\n\n## Measured\n\n![second]")
    assert text.count("figures/diloco.svg") == 1
    assert text.count("## Measured") == 1
    page.write_text(text.replace("![second]", "A table.\n\n![second]"), encoding="utf-8")
    plots.place(page, tmp_path / "figures" / "diloco.svg", words="third")
    assert "## Measured\n\nA table.\n\n![third]" in page.read_text(encoding="utf-8")


def test_the_index_says_what_the_strategies_say() -> None:
    text = index.PAGE.read_text(encoding="utf-8")
    assert text == index.with_table(text), "run python -m bench.methods.index"


def test_every_figure_that_a_page_shows_is_there() -> None:
    for page in index.PAGE.parent.rglob("*.md"):
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / name).stat().st_size < 40_000, f"{page.name}: {name}"
