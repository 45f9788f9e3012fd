"""A member's measurements in the tools that people use: `[log] to = [...]`.

Each library is loaded only if it is wanted, and writes files below the member's `logs` folder
unless the job is to log online. Points go through a queue to a thread: training never waits, and a
tool that fails is dropped with a warning.
"""

from __future__ import annotations

import csv
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from atoll.config import LogTable
from atoll.config.log_table import FOLDER
from atoll.errors import ConfigError
from atoll.wire.messages import Point

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 120.0
"""How long the end of a member waits for its loggers."""


class Logger(Protocol):
    """Takes a member's points, on one thread."""

    def write(self, point: Point) -> None:
        """Write the values of one point."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Loggers:
    """All loggers of a member, which work on a thread of their own."""

    def __init__(self, make: Sequence[Callable[[], Logger]]) -> None:
        """Each of `make` opens one logger, on that thread."""
        self._make = make
        self._queue: SimpleQueue[Point | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, point: Point) -> None:
        """Pass a point on; does not block."""
        if not self._make:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="loggers", daemon=True)
            self._thread.start()
        self._queue.put(point)

    def before(self, then: Callable[[Point], None]) -> Callable[[Point], None]:
        """Return a function that passes a point on to the loggers, and then to `then`."""
        if not self._make:
            return then

        def both(point: Point) -> None:
            self.add(point)
            then(point)

        return both

    def close(self) -> None:
        """Write what was passed on; waits for a limited time."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the loggers did not finish in %s s", CLOSE_TIMEOUT_S)
        self._thread = None

    def _work(self) -> None:
        opened = [one for one in (_guarded(make) for make in self._make) if one is not None]
        while (point := self._queue.get()) is not None:
            for one in list(opened):
                try:
                    one.write(point)
                except Exception as error:  # libraries of others: they must not end a run
                    log.warning("%s no longer logs: %s", type(one).__name__, error)
                    opened.remove(one)
        for one in opened:
            _guarded(one.close)


def _guarded(work: Callable[[], Any]) -> Any:
    """Return what a library's work returns; None, with a warning, if it fails."""
    try:
        return work()
    except Exception as error:  # libraries of others: they must not end a run
        log.warning("a logger failed: %s", error)
        return None


def open_loggers(table: LogTable, directory: Path, *, job: str, member: str) -> Loggers:
    """Return the loggers of a member; files are below `directory`.

    Raises:
        ConfigError: a library is not installed; its extra is named.
    """
    folder, name = directory / FOLDER, f"{job}-{member}"
    for word in table.to:
        _check_installed(word)
    return Loggers([_opener(word, table, folder, group=job, name=name) for word in table.to])


def _opener(
    word: str, table: LogTable, folder: Path, *, group: str, name: str
) -> Callable[[], Logger]:
    def opened() -> Logger:
        folder.mkdir(parents=True, exist_ok=True)
        return KINDS[word](table, folder, group, name)

    return opened


def _check_installed(word: str) -> None:
    import importlib.util

    if word != "csv" and importlib.util.find_spec(word) is None:
        raise ConfigError(
            f"{word} in [log] is not installed", given=f"no module {word}",
            expected="the library on every machine of the job",
            remedy="pip install trackio" if word == "trackio" else "pip install 'atoll[log]'",
        )  # fmt: skip


class CsvLogger:
    """`metrics.csv`: a line per value, with time, step, round, name and value."""

    def __init__(self, table: LogTable, folder: Path, group: str, name: str) -> None:
        path = folder / "metrics.csv"
        new = not path.exists()
        self._file = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        if new:
            self._rows.writerow(["time", "step", "round", "name", "value"])

    def write(self, point: Point) -> None:
        """Append the values of one point."""
        for name, value in point.values.items():
            self._rows.writerow([point.time, point.step, point.round, name, value])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, table: LogTable, folder: Path, group: str, name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter  # untyped
        self._writer = make(str(folder / "tensorboard"))

    def write(self, point: Point) -> None:
        """Write a scalar per value."""
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step, walltime=point.time)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; offline its folder can be sent later by `wandb sync`."""

    def __init__(self, table: LogTable, folder: Path, group: str, name: str) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=table.project, group=group, name=name, dir=str(folder), reinit="create_new",
            mode="online" if table.online else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, point: Point) -> None:
        """Log all values; `step` is one of them, since the library's own must never fall."""
        self._run.log({**point.values, "step": point.step, "round": point.round})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowLogger:
    """A run of MLflow, in the database `logs/mlflow.db` unless online."""

    def __init__(self, table: LogTable, folder: Path, group: str, name: str) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        store = None if table.online else f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=store)
        known = self._client.get_experiment_by_name(table.project)
        experiment = known.experiment_id if known else self._client.create_experiment(table.project)
        run = self._client.create_run(experiment, run_name=name, tags={"group": group})
        self._run = run.info.run_id

    def write(self, point: Point) -> None:
        """Log all values of a point in one call."""
        moment = int(point.time * 1000)
        metrics = [self._metric(n, v, moment, point.step) for n, v in point.values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class TrackioLogger:
    """A run of trackio, in its database on this machine."""

    def __init__(self, table: LogTable, folder: Path, group: str, name: str) -> None:
        import trackio

        self._module: Any = trackio
        self._run = trackio.init(project=table.project, name=name, config={"group": group})

    def write(self, point: Point) -> None:
        """Log all values."""
        self._module.log({**point.values, "step_of_schedule": point.step})

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


KINDS: dict[str, Callable[[LogTable, Path, str, str], Logger]] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}
"""Word in `[log]` -> its logger."""
