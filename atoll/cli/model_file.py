"""Find a run's model file."""

from __future__ import annotations

from pathlib import Path

from atoll.cli.jobs.names import local_run
from atoll.cli.jobs.results import newest_checkpoint
from atoll.errors import ConfigError


def find_model(where: Path) -> Path:
    """Return the model's file: the final one of a run, or that of its newest checkpoint.

    Raises:
        ConfigError: there is none.
    """
    if where.is_file():
        return where
    where = local_run(str(where), Path("runs")) or where
    final = where / "model.safetensors"
    if final.exists():
        return final
    checkpoint = newest_checkpoint(where)
    if checkpoint is not None and (checkpoint / "shared.safetensors").exists():
        return checkpoint / "shared.safetensors"
    raise ConfigError(
        "there is no trained model",
        given=str(where),
        expected="a .safetensors file, or a folder runs/JOB with model.safetensors in it",
        remedy="train one: atoll demo",
    )
