"""Every logger writes what the member measured; read back with the tool's own library."""

from __future__ import annotations

import csv
import importlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import LogTable, dump_spec, parse_spec, read_spec
from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.results import loggers
from atoll.train.results.loggers import Loggers, open_loggers
from atoll.wire.messages import Point

POINTS = [
    Point(time=1000.0 + n, step=n, round=n // 2, values={"loss": 2.0 - n / 4, "lr": 0.5})
    for n in range(4)
]
WANTED = [(point.step, point.values["loss"]) for point in POINTS]

Series = list[tuple[int, float]]


def read_csv(folder: Path) -> Series:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "loss"]
    return [(int(row["step"]), float(row["value"])) for row in rows]


def read_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing import event_accumulator

    events: Any = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline file: a LevelDB log behind a header of seven bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:  # the end of a block is empty
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(folder: Path) -> Series:
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found = []
    for data in wandb_records(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            named = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            found.append((int(named["step"]), float(named["loss"])))
    return found


def read_mlflow(folder: Path) -> Series:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(folder / 'mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "job-w1"
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]


def read_trackio(folder: Path) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("mine", "job-w1")
    return [(int(row["step_of_schedule"]), float(row["loss"])) for row in rows]


READERS: dict[str, Callable[[Path], Series]] = {
    "csv": read_csv,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("word", READERS)
def test_points_are_read_back(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if word != "csv":
        pytest.importorskip(word, reason="pip install 'atoll[log]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "trackio"))
    opened = open_loggers(LogTable(to=[word], project="mine"), tmp_path, job="job", member="w1")
    for point in POINTS:
        opened.add(point)
    opened.close()
    assert READERS[word](tmp_path / "logs") == WANTED


def test_values_of_a_script_reach_its_loggers(tmp_path: Path) -> None:
    table = LogTable(to=["csv"])
    with Run(SingleGroup(), Membership(tmp_path, job="job", log=table)) as run:
        model = torch.nn.Linear(2, 1)
        optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        run.log(loss=0.25, tokens=3, accuracy=0.75)
        optimizer.step()
    with (tmp_path / "logs" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        found = {row["name"]: float(row["value"]) for row in csv.DictReader(file)}
    assert found["loss"] == 0.25
    assert found["accuracy"] == 0.75
    assert found["tokens"] == 3


class Failing:
    """Fails at its second point."""

    def __init__(self) -> None:
        self.seen = 0

    def write(self, point: Point) -> None:
        self.seen += 1
        if self.seen == 2:
            raise OSError("no room")

    def close(self) -> None:
        raise AssertionError("closed after it was dropped")


def test_a_failing_logger_ends_neither_run_nor_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()

    def broken() -> Failing:
        raise RuntimeError("cannot open")

    table = LogTable(to=["csv"])
    ours = loggers.CsvLogger(table, tmp_path, "job", "job-w0")
    several = Loggers([lambda: failing, broken, lambda: ours])
    with caplog.at_level(logging.WARNING):
        for point in POINTS:
            several.add(point)
        several.close()
    assert failing.seen == 2
    assert read_csv(tmp_path) == WANTED
    assert "no room" in caplog.text
    assert "cannot open" in caplog.text


def test_unknown_and_missing_loggers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="tensorboard"):
        read_spec({"log": {"to": ["tensorbord"]}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"atoll\[log\]"):
        open_loggers(LogTable(to=["wandb"]), tmp_path, job="job", member="w0")


def test_logs_are_collected_once() -> None:
    spec = read_spec({"log": {"to": ["csv"]}, "job": {"artifacts": ["x"]}})
    assert spec.job.artifacts == ["x", "/logs/"]
    assert parse_spec(dump_spec(spec)) == spec
