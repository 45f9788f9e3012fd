"""What a person typed becomes a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.jobfile import Overrides, demo_text, parse_text, read_target
from atoll.config import dump_spec, parse_spec
from atoll.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_job_file_is_read_and_options_win_over_it(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[job]\nnodes = 4\n[strategy]\npreset = "diloco"\nevery = 50\n')
    overrides = Overrides(
        nodes=2,
        outer="average",
        codec="fp32",
        every=7,
        settings=["train.lr=1e-3", "data.corpus=files:*.txt", "train.betas=[0.8, 0.9]"],
    )
    spec = read_target(path, overrides).spec
    assert spec.job.nodes == 2
    assert (spec.strategy.outer, spec.strategy.codec) == ("average", "fp32")
    assert spec.strategy.options["every"] == 7
    assert spec.train.lr == 1e-3
    assert spec.train.betas == [0.8, 0.9]
    assert spec.data.corpus == "files:*.txt"


def test_script_travels_with_its_name_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "My Train.py"
    path.write_text("print(1)\n")
    submission = read_target(path, Overrides(nodes=3, arguments=["--x", "1"]))
    assert submission.files == {"My Train.py": "print(1)\n"}
    assert submission.spec.job.script == "My Train.py"
    assert submission.spec.job.args == ["--x", "1"]
    assert submission.spec.job.name == "my-train"
    assert parse_spec(submission.text) == submission.spec


def test_script_named_in_a_job_file_is_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.toml").write_text('[job]\nscript = "train.py"\n')
    assert read_target(tmp_path / "job.toml", Overrides()).files == {"train.py": "print(1)\n"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lr=1"], r"TABLE\.KEY=VALUE"),
        (["train.lr"], r"TABLE\.KEY=VALUE"),
        (["train.lrr=1"], r"unknown key in \[train\].*did you mean 'lr'"),
        (["trian.lr=1"], r"unknown table.*did you mean 'train'"),
        (["train.lr=fast"], r"lr in \[train\] has the wrong type"),
    ],
)
def test_wrong_setting_is_explained(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_text("", Overrides(settings=settings), name="x")


def test_thing_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        read_target(tmp_path / "job.yaml", Overrides())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_target(tmp_path / "job.toml", Overrides())
    (tmp_path / "bad.toml").write_text("[job\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_target(tmp_path / "bad.toml", Overrides())


@pytest.mark.parametrize("text", [demo_text(), (ROOT / "examples" / "gpt.toml").read_text()])
def test_shipped_job_files_are_valid(text: str) -> None:
    spec = parse_text(text, Overrides(), name="shipped").spec
    assert spec.job.nodes == 4
    assert parse_spec(dump_spec(spec)) == spec
