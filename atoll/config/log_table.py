"""`[log]`: tools that a job's measurements go to, besides the hub."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import unknown

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
FOLDER = "logs"
"""Folder of a member's process in which they write; it is collected as an artifact."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogTable:
    """`[log]`: where measurements go, also those of `run.log`."""

    to: list[str] = dataclasses.field(default_factory=list)
    """`csv`, `tensorboard`, `wandb`, `mlflow`, `trackio`."""
    project: str = "atoll"
    """Project or experiment there; runs are called JOB-MEMBER, in the group JOB."""
    online: bool = False
    """`wandb` and `mlflow` send to the server that their own variables name, e.g. `WANDB_API_KEY`
    in `[launch] env`; else they write files."""


def with_log(spec: JobSpec) -> JobSpec:
    """Return a job whose logs are collected."""
    pattern = f"/{FOLDER}/"
    if not spec.log.to or pattern in spec.job.artifacts:
        return spec
    job = dataclasses.replace(spec.job, artifacts=[*spec.job.artifacts, pattern])
    return dataclasses.replace(spec, job=job)


def check_log(spec: JobSpec) -> None:
    """Refuse loggers that do not exist; raises ConfigError with the nearest name."""
    for name in spec.log.to:
        if name not in LOGGERS:
            raise unknown("logger in [log]", name, LOGGERS)
