"""What a person typed becomes a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.cli.commands.scale import read_bounds
from atoll.cli.jobs.jobfile import (
    Overrides,
    anywhere,
    demo_text,
    parse_text,
    read_target,
    read_targets,
    sort_words,
)
from atoll.cli.jobs.submit import check_nodes, one_per_node
from atoll.config import MeshShape, dump_spec, parse_spec
from atoll.errors import ConfigError, PlanError

ROOT = Path(__file__).resolve().parents[3]


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


ISLANDS = '[strategy]\ninner = "hybrid"\n[island]\nmesh = {replicate = 2, tensor = 2}\n'


FSDP = '[strategy]\ninner = "fsdp"\n[island]\nranks = 4\n'


@pytest.mark.parametrize(
    ("text", "options", "inner", "mesh"),
    [
        ("", {"inner": "fsdp", "ranks": 4}, "fsdp", MeshShape(shard=4)),
        ("", {"mesh": "replicate=2,tensor=2"}, "hybrid", MeshShape(replicate=2, tensor=2)),
        ("", {"mesh": "pipeline = 3", "inner": "pipeline"}, "pipeline", MeshShape(pipeline=3)),
        (ISLANDS, {"inner": "tensor", "ranks": 2}, "tensor", MeshShape(tensor=2)),
        (ISLANDS, {"inner": "hybrid"}, "hybrid", MeshShape(replicate=2, tensor=2)),
        (ISLANDS, {"mesh": "shard=2"}, "hybrid", MeshShape(shard=2)),
        (FSDP, {"mesh": "shard=2"}, "fsdp", MeshShape(shard=2)),
        (FSDP, {"mesh": "shard=2,tensor=2"}, "hybrid", MeshShape(shard=2, tensor=2)),
        (ISLANDS, {"inner": "local"}, "local", MeshShape()),
    ],
)
def test_options_say_how_a_member_lies_over_its_processes(
    text: str, options: dict[str, Any], inner: str, mesh: MeshShape
) -> None:
    spec = parse_text(text, Overrides(precision="bf16", device="cpu", **options), name="x").spec
    assert (spec.strategy.inner, spec.mesh, spec.train.precision) == (inner, mesh, "bf16")
    assert spec.job.device == "cpu"
    assert parse_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "replicate=2;tensor=2"}, "replicate=2,tensor=2"),
        ({"mesh": "tensor=2,tensor=2"}, "each axis once"),
        ({"mesh": "tensr=2"}, "tensor"),
        ({"mesh": "replicate=2,tensor=2", "ranks": 6}, "set ranks ="),
        ({"inner": "fsdp", "settings": ["island.ranks=8", "island.mesh={shard=4}"]}, "leave mesh"),
        ({"ranks": 2}, "one of ddp, fsdp"),
        ({"settings": ["island.machines=2"], "inner": "fsdp", "ranks": 3}, "4 ranks, or"),
    ],
)
def test_islands_that_cannot_be_are_refused_with_what_can(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_text("", Overrides(**options), name="x")


@pytest.mark.parametrize(
    "text",
    ['[job]\ncommand = ["true"]\n', '[rl]\n[[rl.policies]]\nname = "cart"\nenv = "CartPole-v1"\n'],
)
def test_programs_that_are_one_process_are_no_islands(text: str) -> None:
    with pytest.raises(ConfigError, match="in one process per member"):
        parse_text(text, Overrides(inner="ddp", ranks=2), name="x")


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
    with pytest.raises(ConfigError, match="there is no such file"):
        read_target(tmp_path / "job.toml", Overrides())
    (tmp_path / "bad.toml").write_text("[job\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_target(tmp_path / "bad.toml", Overrides())


def test_file_with_a_typo_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "gpt.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as found:
        read_target(Path("exmples/gpt.toml"), Overrides())
    assert found.value.remedy == f"did you mean {Path('examples/gpt.toml')}?"
    with pytest.raises(ConfigError) as other:
        read_target(Path("something.toml"), Overrides())
    assert "atoll run demo" in str(other.value.remedy)


@pytest.mark.parametrize("text", [demo_text(), (ROOT / "examples" / "gpt.toml").read_text()])
def test_shipped_job_files_are_valid(text: str) -> None:
    spec = parse_text(text, Overrides(), name="shipped").spec
    assert spec.job.nodes == 4
    assert parse_spec(dump_spec(spec)) == spec


SEVERAL = """
[job]
name = "base"
retries = 2
[train]
steps = 50
lr = 1e-3
[[jobs]]
[jobs.job]
name = "first"
on = ["lap1"]
[[jobs]]
[jobs.job]
name = "second"
[jobs.train]
lr = 2e-3
"""


def test_jobs_of_one_file_are_laid_over_what_is_common(tmp_path: Path) -> None:
    path = tmp_path / "four.toml"
    path.write_text(SEVERAL)
    first, second = (s.spec for s in read_targets([path], Overrides(settings=["train.steps=9"])))
    assert (first.job.name, first.job.on, first.job.retries) == ("first", ["lap1"], 2)
    assert (first.train.lr, first.train.steps) == (1e-3, 9)
    assert (second.job.name, second.job.on, second.train.lr) == ("second", [], 2e-3)
    with pytest.raises(ConfigError, match="holds several jobs"):
        read_target(path, Overrides())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[jobs]\nname = 'x'\n", r"must be a list of tables.*\[\[jobs\]\]"),
        ("jobs = []\n", r"must be a list of tables.*\[\[jobs\]\]"),
        ("job = 'x'\n", r"job must be a table.*\[job\]"),
        ("island = 'fsdp'\n", r"island must be a table.*\[island\]"),
        ("[[jobs]]\n[jobs.jop]\nname = 'x'\n", "unknown table.*did you mean 'job'"),
        ("[[jobs]]\n[jobs.job]\nnam = 'x'\n", "unknown key.*did you mean 'name'"),
    ],
)
def test_jobs_that_cannot_be_read_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "four.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_targets([path], Overrides())


def test_further_job_files_come_before_arguments(tmp_path: Path) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    b.write_text("")
    assert sort_words(a, [str(b), "--x", str(b)]) == ([a, b], ["--x", str(b)])
    assert sort_words(a, ["absent.toml"]) == ([a], ["absent.toml"])
    assert sort_words(tmp_path / "t.py", [str(b)]) == ([tmp_path / "t.py"], [str(b)])


def test_options_say_where_and_how_urgent(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[job]\non = ["lap1"]\npriority = 1\n')
    kept = read_target(path, Overrides()).spec.job
    assert (kept.on, kept.priority) == (["lap1"], 1)
    changed = read_target(path, Overrides(on=["lap2", "lap3"], priority=-1))
    assert (changed.spec.job.on, changed.spec.job.priority) == (["lap2", "lap3"], -1)
    assert [one.spec.job.on for one in anywhere([changed], each=False)] == [[]]
    with pytest.raises(ConfigError, match="nodes of a hub"):
        anywhere([changed], each=True)


def test_code_is_found_beside_the_job_file_and_holds_the_script(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "job.toml"
    path.write_text('[job]\ncode = "src"\nscript = "train.py"\n')
    with pytest.raises(ConfigError, match="is not in its code"):
        read_target(path, Overrides())
    (tmp_path / "src" / "train.py").write_text("print(1)\n")
    found = read_target(path, Overrides())
    assert (found.code, found.files) == (tmp_path / "src", {})
    packed = read_target(path, Overrides(settings=[f'job.code="sha256:{"0" * 64}"']))
    assert packed.code is None


def view(node: str, *, state: str = "online", **info: Any) -> dict[str, Any]:
    base = {"hostname": "b", "system": "Linux", "python": "3", "atoll": "1", "cores": 4}
    return {"node": node, "state": state, "info": {**base, **info}, "stats": {}}


def test_each_makes_a_copy_for_every_node_that_takes_the_job() -> None:
    job = parse_text('[job]\nname = "j"\nnodes = 3\n[needs]\ncores = 2\n', Overrides(), name="x")
    nodes = [view("lap1"), view("lap2", cores=1), view("Lap3", state="lost")]
    copies, skipped = one_per_node([job], nodes)
    assert [(c.spec.job.name, c.spec.job.on, c.spec.job.nodes) for c in copies] == [
        ("j-lap1", ["lap1"], 1)
    ]
    assert skipped == ["j: lap2: 2 cores wanted, it has 1", "j: Lap3: not connected"]
    paused = {"type": "Offer", "paused": "on battery"}
    with pytest.raises(PlanError, match="lap1: on battery"):
        one_per_node([job], [view("lap1", offer=paused)])


@pytest.mark.parametrize(("text", "bounds"), [("2:8", (2, 8)), ("4", (0, 4)), ("1:1", (1, 1))])
def test_bounds_are_read(text: str, bounds: tuple[int, int]) -> None:
    assert read_bounds(text) == bounds


@pytest.mark.parametrize("text", ["", "a:b", "2:", ":8", "1:2:3"])
def test_bounds_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MIN:MAX"):
        read_bounds(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[job]\nrequirements = "r.txt"\n', "are a file of its code"),
        ('[launch]\nenv = ["A"]\n', "NAME=VALUE"),
        ('[launch]\nenv = ["ATOLL_TOKEN=x"]\n', "does not begin with ATOLL_"),
        ('[launch]\nmounts = ["/a:/b"]\n', "for containers only"),
        ("[launch]\nread_only = true\n", "for containers only"),
        ('[launch]\nlauncher = "container"\n', "do not fit together"),
        ('[job]\ncommand = ["a"]\nscript = "b.py"\n', "runs one program"),
        ("[needs]\ncores = -1.0\n", "must not be negative"),
    ],
)
def test_programs_that_contradict_themselves_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_spec(text)


def test_the_demo_runs_on_as_many_machines_as_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = read_target(Path("demo"), Overrides()).spec
    assert (spec.job.min_nodes, spec.job.nodes, spec.job.name) == (1, 8, "demo")
    assert read_target(Path("demo"), Overrides(nodes=2)).spec.job.nodes == 2
    with pytest.raises(ConfigError, match="atoll run demo"):
        read_target(Path("dem"), Overrides())


def test_unknown_node_is_refused_with_the_names_there_are() -> None:
    nodes = [view("lap1"), view("attic-1a2b")]
    known = parse_text('[job]\non = ["lap1", "attic"]\n', Overrides(), name="x")
    check_nodes([known], nodes)
    wrong = parse_text('[job]\non = ["lap11"]\n', Overrides(), name="x")
    with pytest.raises(ConfigError, match=r"'lap11'.*attic-1a2b, lap1.*did you mean lap1\?"):
        check_nodes([wrong], nodes)
    with pytest.raises(ConfigError, match="none has"):
        check_nodes([wrong], [])
