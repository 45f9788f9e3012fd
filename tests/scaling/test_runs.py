"""Points from the files that runs leave, and from tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from atoll.config import JobSpec, dump_spec, read_spec
from atoll.errors import ConfigError, RunsContradict
from atoll.models import GPT, GPTConfig
from atoll.scaling.runs import ALL, NON_EMBEDDING, read_points


def leave(
    folder: Path, *, model: bool = True, twice: bool = False, job: Any = None, **changes: Any
) -> Path:
    """Write the files of a finished run of a small GPT."""
    folder.mkdir(parents=True)
    spec = read_spec(job or tables())
    (folder / "job.toml").write_text(dump_spec(spec), encoding="utf-8")
    summary = {
        "parameters": parameters(spec), "tokens": 64_000, "nodes": spec.job.nodes, "steps": 50,
        "loss_final": 2.5, "stopped": False,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary | changes), encoding="utf-8")
    if model:
        names = dict(gpt(spec).named_parameters(remove_duplicate=not twice))
        save_file(
            {name: tensor.detach().clone() for name, tensor in names.items()},
            folder / "model.safetensors",
        )
    return folder


def tables(**more: Any) -> dict[str, Any]:
    """Return the tables of a job."""
    return {
        "job": {"nodes": 2},
        "model": {"layers": 1, "width": 16, "heads": 2, "context": 32},
        "train": {"steps": 50, "batch": 4, "lr": 0.01},
        "strategy": {"preset": "diloco", "every": 25, "outer_lr": 0.8, "codec": "fp32"},
        **more,
    }


def gpt(spec: JobSpec) -> GPT:
    """Return the model of a job."""
    return GPT(GPTConfig(**spec.model.options))


def parameters(spec: JobSpec) -> int:
    """Return its number of parameters."""
    return sum(tensor.numel() for tensor in gpt(spec).parameters())


def test_a_finished_run_is_a_point(tmp_path: Path) -> None:
    folder = leave(tmp_path / "one")
    found = read_points([folder])
    (point,) = found.points
    whole = parameters(read_spec(tables()))
    assert found.counted == NON_EMBEDDING
    assert point.params == whole - 256 * 16
    assert (point.tokens, point.members, point.every, point.loss) == (64_000, 2, 25, 2.5)
    assert (point.batch, point.lr, point.outer_lr) == (8, 0.01, 0.8)
    assert point.name == str(folder)
    every = read_points([folder], count="all")
    assert (every.counted, every.points[0].params) == (ALL, whole)


def test_weights_that_are_shared_count_once(tmp_path: Path) -> None:
    once, twice = leave(tmp_path / "once"), leave(tmp_path / "twice", twice=True)
    sizes = [read_points([folder]).points[0].params for folder in (once, twice)]
    assert sizes[0] == sizes[1]


def test_a_method_that_meets_every_step_has_one_step_between(tmp_path: Path) -> None:
    folder = leave(tmp_path / "ddp", job=tables(strategy={"preset": "ddp"}))
    assert read_points([folder]).points[0].every == 1


def test_without_a_model_file_all_runs_count_all_parameters(tmp_path: Path) -> None:
    both = [leave(tmp_path / "a"), leave(tmp_path / "b", model=False)]
    found = read_points(both)
    assert found.counted == ALL
    assert {point.params for point in found.points} == {parameters(read_spec(tables()))}
    strict = read_points(both, count="non-embedding")
    assert [Path(point.name).name for point in strict.points] == ["a"]
    assert "model.safetensors is missing" in strict.skipped[0]


def test_a_folder_of_runs_is_all_of_them_and_none_counts_twice(tmp_path: Path) -> None:
    names = [leave(tmp_path / "sweep" / name) for name in "abc"]
    (tmp_path / "sweep" / "jobs").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}", encoding="utf-8")
    found = read_points([tmp_path / "sweep", names[1], tmp_path / "sweep" / "sweep.json"])
    assert [Path(point.name).name for point in found.points] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_final": None}, "summary.json has no loss_final"),
        ({"tokens": 0, "parameters": 0}, "summary.json has no parameters, tokens"),
        ({"stopped": True}, "summary.json: the run was stopped before its end"),
    ],
)
def test_what_a_run_lacks_is_said_with_its_file(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    good, bad = leave(tmp_path / "good"), leave(tmp_path / "bad", **changes)
    found = read_points([good, bad])
    assert [point.name for point in found.points] == [str(good)]
    assert found.skipped == (f"{bad}: {said}",)


def test_missing_and_damaged_files_are_said(tmp_path: Path) -> None:
    going, damaged = leave(tmp_path / "going"), leave(tmp_path / "damaged")
    (going / "summary.json").unlink()
    (damaged / "job.toml").write_text("[job", encoding="utf-8")
    found = read_points([going, damaged])
    assert found.points == ()
    assert "summary.json is missing: the run has not ended" in found.skipped[0]
    assert "it cannot be read (" in found.skipped[1]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"data": {"tokenizer": "bpe:512"}}, "tokenizer"),
        ({"strategy": {"preset": "local-sgd"}}, "outer"),
        ({"model": {"layers": 1, "width": 16, "heads": 2, "context": 64}}, "context"),
    ],
)
def test_runs_of_two_kinds_are_refused_with_what_differs(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    runs = [leave(tmp_path / "a"), leave(tmp_path / "b", job=tables(**other), model=False)]
    with pytest.raises(RunsContradict, match=rf"{named}.*belong together"):
        read_points(runs)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run"):
        read_points([tmp_path / "missing"])
    with pytest.raises(ConfigError, match=r"some.*all or non-embedding"):
        read_points([leave(tmp_path / "a")], count="some")


def test_a_table_has_a_point_per_line(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("params,tokens,loss,members,name\n1e6,2e7,3.5,2,a\n2e6,4e7,3.2,4,\n", "utf-8")
    found = read_points([path])
    assert [(p.params, p.tokens, p.loss, p.members) for p in found.points] == [
        (1e6, 2e7, 3.5, 2),
        (2e6, 4e7, 3.2, 4),
    ]
    assert [p.name for p in found.points] == ["a", f"{path}:3"]
    assert found.points[0].every == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("params,los\n1,2\n", "los"),
        ("members,loss\n1,2\n", "params or tokens"),
        ("", "an empty table"),
        ("params,loss\n1e6,lots\n", "loss is not a number.*'lots'.*csv:2"),
        ("params,loss\n1e6,3\n,3\n", "params is missing.*csv:3"),
    ],
)
def test_a_table_with_an_error_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_points([path])


def test_a_table_of_a_spreadsheet_may_begin_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("params,loss\n1e6,3\n", encoding="utf-8-sig")
    assert read_points([path]).points[0].params == 1e6


def test_a_table_cannot_be_mixed_with_runs(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("params,loss\n1,2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be mixed"):
        read_points([leave(tmp_path / "a"), tmp_path / "p.csv"])
