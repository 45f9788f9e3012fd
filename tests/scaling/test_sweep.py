"""The runs of a sweep file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.config import dump_spec, parse_spec
from atoll.errors import ConfigError
from atoll.scaling.sweep import make_sweep, read_sweep

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scaling_sweep.toml"


def tables(**changes: Any) -> dict[str, Any]:
    """Return a sweep of two sizes."""
    sweep: dict[str, Any] = {
        "tokens": [8_192, 16_384], "members": [1, 2], "every": [4, 8], "batch": 8,
        "sizes": [{"width": 16, "lr": 0.02}, {"width": 32}],
    }  # fmt: skip
    common = {"model": {"context": 32}, "train": {"lr": 0.01, "warmup": 50}}
    return {**common, "sweep": {**sweep, **changes}}


def test_every_combination_is_a_run_with_its_own_key() -> None:
    found = make_sweep(tables(), name="small")
    assert len(found.runs) == 16
    assert len({run.key for run in found.runs}) == 16
    assert found.most_members == 2
    for run in found.runs:
        train, job = run.spec.train, run.spec.job
        assert train.batch * job.nodes == 8
        assert train.pace == "equal"
        assert train.steps * 8 * 32 == run.tokens
        assert train.warmup == train.steps // 10
        assert parse_spec(dump_spec(run.spec)) == run.spec
    assert {run.spec.train.lr for run in found.runs} == {0.02, 0.01}
    assert {run.spec.strategy.options["every"] for run in found.runs} == {4, 8}
    assert {run.tokens for run in found.runs} == {8_192, 16_384}


def test_the_key_of_a_run_changes_with_its_settings_only() -> None:
    first = make_sweep(tables(), name="small")
    again = make_sweep(tables(), name="small")
    other = make_sweep({**tables(), "train": {"lr": 0.01, "weight_decay": 0.2}}, name="small")
    assert [run.key for run in first.runs] == [run.key for run in again.runs]
    assert not {run.key for run in first.runs} & {run.key for run in other.runs}


def test_rates_batches_and_seeds_can_be_varied() -> None:
    more = {"lr": [0.01, 0.02], "outer_lr": [0.5, 0.9], "batch": [4, 8], "seeds": [1, 2]}
    found = make_sweep(tables(members=1, every=4, tokens=8_192, **more), name="tuning")
    assert len(found.runs) == 2 * 2 * 2 * 2 * 2
    assert {run.spec.job.seed for run in found.runs} == {1, 2}
    assert {run.spec.strategy.options["outer_lr"] for run in found.runs} == {0.5, 0.9}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 3}, "batch = 3, members = 2.*multiple of members"),
        ({"tokens": [512]}, "shorter than a round.*512 tokens.*256 per step: 2 steps"),
        ({"tokens": []}, "tokens in .sweep. cannot be used"),
        ({"tokens": ["many"]}, "tokens in .sweep. cannot be used.*many"),
        ({"members": [0]}, "members in .sweep. cannot be used.*at least 1"),
        ({"member": [1]}, "unknown key in .sweep.*did you mean 'members'"),
        ({"sizes": []}, "at least one size"),
        ({"seeds": list(range(900))}, "too many runs"),
    ],
)
def test_a_sweep_with_an_error_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_sweep(tables(**changes), name="small")


def test_a_key_in_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name = 'small'.*tables of a job file"):
        make_sweep({"name": "small", **tables()}, name="small")


def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[job]\nname = 'x'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no sweep.*\[\[sweep.sizes\]\]"):
        read_sweep(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sweep(tmp_path / "missing.toml")


def test_the_example_is_three_sizes_three_lengths_two_groups() -> None:
    found = read_sweep(EXAMPLE)
    assert len(found.runs) == len(tomllib.loads(EXAMPLE.read_text("utf-8"))["sweep"]["sizes"]) * 6
    assert found.name == "scaling_sweep"
    assert found.most_members == 2
