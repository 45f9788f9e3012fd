"""`atoll checkpoint`: every verb on folders, URLs and hubs, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.checkpoint import (
    DirectoryStore,
    Extras,
    OuterState,
    Part,
    SavePoint,
    collect,
    describe,
    resume,
)
from atoll.checkpoint.background.copies import CheckpointCopies
from atoll.checkpoint.sharded import ShardedInfo, Trained, save_sharded
from atoll.cli import hub_access
from atoll.cli import main as command
from atoll.cli.checkpoint_place import chosen_round
from atoll.errors import ConfigError
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.task import Task
from atoll.wire.manifest import checkpoint_folder
from tests.hub.membership import Running
from tests.hub.rounds.test_checkpoints import commit


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        command.main(["checkpoint", *words])
    return int(leaving.value.code or 0)


def task(*, value: float = 0.0) -> Task:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.1))


def parts(round_: int) -> list[Part]:
    trained = task(value=float(round_))
    trained.round, trained.step = round_, 10 * round_
    about = describe("net", options={"width": 3}, tokenizer="{}")
    own, common = collect(trained, OuterState(base=f"b{round_}"), Extras(about=about))
    return [common, own]


def fill(folder: Path, *rounds: int) -> DirectoryStore:
    store = DirectoryStore(folder, keep=9)
    for round_ in rounds:
        store.put(SavePoint(round_, 10 * round_, "w0", ["w0"], score=1.0 / round_), parts(round_))
    return store


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of runs with a job of two checkpoints, in a home without a hub."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "runs" / "job", 2, 4)
    return tmp_path / "runs"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["job", "runs/job", "./runs/job"])
def test_list_names_every_checkpoint(
    runs: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("list", where) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][:2] == ["round", "step"]
    assert [line[:2] for line in lines[1:3]] == [["2", "20"], ["4", "40"]]
    assert "0.5000" in shown


def test_show_names_parts_members_and_versions(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", "job") == 0
    shown = capsys.readouterr().out
    for text in ("shared.safetensors", "w0.safetensors", "0.2500", "torch", "round", "4"):
        assert text in shown
    assert run("show", "job", "--round", "2") == 0
    assert "20" in capsys.readouterr().out


def test_verify_names_every_damaged_part_and_fails(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "job") == 0
    assert capsys.readouterr().out.splitlines() == ["round 2: good", "round 4: good"]
    damage(runs / "job" / checkpoint_folder(4) / "w0.safetensors")
    (runs / "job" / checkpoint_folder(2) / "shared.safetensors").unlink()
    assert run("verify", "job") == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "round 2: 1 of 2 parts damaged", "round 4: 1 of 2 parts damaged"
    ]  # fmt: skip
    assert "shared.safetensors of the checkpoint of round 2 is missing" in shown.err
    assert "w0.safetensors of the checkpoint of round 4 was altered" in shown.err
    assert run("verify", "job", "--round", "2") == 1


def test_export_is_plain_safetensors_with_plain_names(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", "job", "out.safetensors") == 0
    assert "round 4 -> out.safetensors" in capsys.readouterr().out
    tensors = load_file("out.safetensors")
    assert set(tensors) == {"weight", "bias"}
    assert tensors["weight"].tolist() == [[4.0] * 3] * 2
    assert run("export", "job", "--round", "2") == 0
    assert load_file("model.safetensors")["weight"][0, 0] == 2.0
    from atoll.checkpoint import load_weights

    weights = load_weights(Path("out.safetensors"))
    assert (weights.model, weights.options) == ("net", {"width": 3})
    assert weights.metadata["round"] == "4"
    assert "tree" not in weights.metadata
    Path("[old]").mkdir()
    assert run("export", "job", "[old]/out.safetensors") == 0
    assert "round 4 -> [old]/out.safetensors" in capsys.readouterr().out


def test_damaged_checkpoint_is_not_exported(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(runs / "job" / checkpoint_folder(4) / "shared.safetensors")
    assert run("export", "job", "out.safetensors") == 1
    assert "was altered" in capsys.readouterr().err
    assert not Path("out.safetensors").exists()


def test_sharded_checkpoint_is_exported_as_one_file(runs: Path) -> None:
    trained = task(value=7.0)
    save_sharded(runs / "big", 3, Trained(trained.model, trained.optimizer), ShardedInfo(30))
    assert run("export", "big", "out.safetensors") == 0
    assert load_file("out.safetensors")["weight"][0, 0] == 7.0
    assert run("verify", "big") == 0


def test_plain_weights_become_a_checkpoint_to_start_from(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.full((2, 3), 5.0), "bias": torch.zeros(2)}, "w.safetensors")
    assert run("import", "w.safetensors", "--into", "start") == 0
    assert "runs/start, round 0" in capsys.readouterr().out
    started = task()
    started.step = 9
    restored = resume(DirectoryStore(runs / "start"), 0, started)
    assert started.model.state_dict()["weight"][0, 0] == 5.0
    assert (started.step, started.round, restored.borrowed) == (0, 0, True)
    assert run("show", "start") == 0
    assert "none: weights only" in capsys.readouterr().out
    assert run("import", "w.safetensors", "--into", "start") == 2
    assert "has checkpoints already" in capsys.readouterr().err


def test_file_that_is_no_safetensors_is_refused_with_a_way_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weight": torch.zeros(1)}, "w.pt")
    assert run("import", "w.pt") == 1
    shown = capsys.readouterr().err
    assert "cannot be read" in shown
    assert "safetensors.torch.save_file" in shown
    assert not (runs / "w").exists() or DirectoryStore(runs / "w").latest() == -1


@pytest.mark.parametrize("where", ["copies/job", "file://{here}/copies"])
def test_copy_comes_back_from_a_url(
    runs: Path, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "job" / "job.toml").write_text("[job]\n")
    for round_ in (2, 4):
        CheckpointCopies(runs / "job", str(tmp_path / "copies")).copy(round_)
    source = where.format(here=tmp_path)
    assert run("list", source) == 0
    assert run("verify", source) == 0
    assert run("export", source, "out.safetensors") == 0
    assert load_file("out.safetensors")["weight"][0, 0] == 4.0
    assert run("import", source, "--into", "back") == 0
    assert run("import", source, "--into", "back", "--round", "2") == 0
    back = DirectoryStore(runs / "back")
    assert [back.verify(round_).round for round_ in (2, 4)] == [2, 4]
    if "://" in where:
        assert (runs / "back" / "job.toml").read_text() == "[job]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "nothing"), "no checkpoints of that name"),
        (("show", "job", "--round", "3"), "one of rounds [2, 4]"),
        (("export", "job", "--round", "9"), "no complete checkpoint of round 9"),
        (("import", "nosuch://bucket/x"), "cannot be used for checkpoints"),
        (("verify", "empty"), "no complete checkpoint"),
    ],
)
def test_what_is_not_there_is_said(
    runs: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "empty" / "checkpoints").mkdir(parents=True)
    assert run(*words) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("verb", ["list", "show", "verify", "export", "import"])
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert f"atoll checkpoint {verb} " in capsys.readouterr().out


@pytest.fixture
def running(runs: Path, tmp_path: Path) -> Iterator[Running]:
    """Yield a job at a hub whose jobs folder is not `runs`, with a checkpoint of round 1."""
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "hub-runs", reducers=False)
    with HubServer(options) as hub:
        group = Running(hub, nodes=1)
        commit(group, 0, group.members)
        fill(tmp_path / "hub-runs" / group.job, 1)
        hub_access.remember(hub_access.KnownHub(hub.url, hub.operator_token, operator=True))
        yield group
        for peer in (*group.members, group.agent):
            peer.close()


def test_checkpoints_of_a_job_at_the_hub(
    running: Running, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = running.job
    assert run("list", job) == 0
    assert run("verify", job) == 0
    assert run("export", job, "out.safetensors") == 0
    assert load_file("out.safetensors")["weight"][0, 0] == 1.0
    assert run("import", job) == 0
    assert DirectoryStore(runs / job).verify(1).round == 1
    damage(tmp_path / "hub-runs" / job / checkpoint_folder(1) / "w0.safetensors")
    assert run("verify", job, "--hub", running.hub.url) == 1
    assert "w0.safetensors" in capsys.readouterr().err


def test_hub_resumes_from_an_imported_checkpoint(running: Running, tmp_path: Path) -> None:
    folder = tmp_path / "hub-runs" / running.job
    CheckpointCopies(folder, str(tmp_path / "copies")).copy(1)
    DirectoryStore(folder).abandon(after=-1)
    assert running.hub.hub is not None
    assert running.hub.call(running.hub.hub.checkpoints.newest(running.job)).round == -1
    where = f"file://{tmp_path}/copies/{running.job}"
    assert run("import", where, "--runs", str(tmp_path / "hub-runs")) == 0
    assert running.hub.call(running.hub.hub.checkpoints.newest(running.job)).round == 1


def test_resume_names_a_checkpoint_by_round_or_folder() -> None:
    assert chosen_round("") is None
    assert chosen_round("12") == 12
    assert chosen_round("runs/j/checkpoints/round-000012/") == 12
    assert chosen_round("start") == -1
    with pytest.raises(ConfigError, match="not a checkpoint"):
        chosen_round("step-500")
