from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from atoll.config import JobSpec, StrategyTable
from atoll.errors import ConfigError
from atoll.methods.periodic import Average, DiLoCo
from atoll.methods.table import METHODS, PRESETS
from atoll.strategies.resolve import FEW_ROUNDS, resolve, resolve_outer
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds(preset: str) -> None:
    resolved = resolve(StrategyTable(preset=preset))
    assert resolved.outer in METHODS
    assert resolved.build().shared_steps >= 0


def test_what_a_job_names_wins_over_its_preset() -> None:
    table = StrategyTable(preset="diloco", codec="fp32", options={"every": 7})
    resolved = resolve(table)
    assert (resolved.outer, resolved.codec) == ("diloco", "fp32")
    assert resolved.method == DiLoCo(**{**PRESETS["diloco"].options, "every": 7})


def test_presets_shared_start_is_at_most_a_tenth() -> None:
    def shared(table: StrategyTable, steps: int) -> int:
        method = resolve(table, steps=steps).method
        assert isinstance(method, DiLoCo)
        return method.shared_steps

    assert shared(StrategyTable(), 2_000) == 170
    assert shared(StrategyTable(), 100) == 10
    assert shared(StrategyTable(options={"shared_steps": 90}), 100) == 90


def test_options_of_a_preset_do_not_reach_another_outer_strategy() -> None:
    assert resolve(StrategyTable(preset="diloco", outer="average")).method == Average()


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        (StrategyTable(preset="dilocco"), "did you mean 'diloco'"),
        (StrategyTable(outer="averag"), "did you mean 'average'"),
        (StrategyTable(inner="locl"), "did you mean 'local'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(table: StrategyTable, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        resolve(table)


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'outer_lr'"):
        resolve(StrategyTable(options={"outer_lrr": 0.5}))


def test_scripts_may_name_a_preset_an_outer_or_give_options() -> None:
    assert resolve_outer("diloco")[1] == "feedback(int8)"
    assert resolve_outer("average") == (resolve_outer("local-sgd")[0], "fp32")
    assert resolve_outer(DiLoCo(every=9), codec="int8") == (DiLoCo(every=9), "int8")
    with pytest.raises(ConfigError, match=r"atoll\.DiLoCo"):
        resolve_outer(3)


def test_scripts_that_name_their_steps_get_the_job_files_options() -> None:
    for steps in (100, 100_000):
        table = StrategyTable(preset="diloco")
        assert resolve_outer("diloco", steps=steps)[0] == resolve(table, steps=steps).method
    few, many = (resolve_outer("diloco", steps=steps)[0] for steps in (100, 100_000))
    assert few != many


def test_naming_strategies_loads_no_torch() -> None:
    code = (
        "import sys; from atoll.config import StrategyTable; import atoll.strategies.resolve as t;"
        "t.resolve(StrategyTable()); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode
        == 0
    )


def test_hubs_know_which_words_need_servers() -> None:
    presets = {name for name in PRESETS if JobSpec(strategy=StrategyTable(preset=name)).served}
    assert presets == {
        "async-diloco", "async-look-ahead", "halos", "parameter-server", "stale-synchronous",
        "async-sgd",
    }  # fmt: skip
    outers = {name for name in METHODS if JobSpec(strategy=StrategyTable(outer=name)).served}
    assert outers == {"asynchronous", "hierarchical", "server"}


@pytest.mark.parametrize("preset", ["diloco", "streaming-diloco"])
def test_outer_step_follows_the_number_of_rounds(preset: str) -> None:
    def momentum(steps: int | None, **options: Any) -> float:
        table = StrategyTable(preset=preset, options={"every": 50, **options})
        return float(resolve(table, steps=steps).method.outer_momentum)  # type: ignore[attr-defined]

    assert momentum(150) == 0.5
    assert momentum(50 * FEW_ROUNDS) == 0.75
    assert momentum(150, outer_momentum=0.6) == 0.6, "what is written counts"
    assert momentum(None) == (0.75 if preset == "diloco" else 0.5), "a script's end is not known"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("preset", "name"), [("diloco", "outer_lr"), ("async-look-ahead", "look_ahead")]
)
def test_an_option_that_is_not_finite_is_refused(preset: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} in .* must be finite"):
        resolve(StrategyTable(preset=preset, options={name: value}))
