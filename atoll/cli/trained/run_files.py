"""The files of a run that a trained model is opened from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.model_file import find_model

if TYPE_CHECKING:
    from atoll.config.tables import JobSpec
    from atoll.export.opened import Opened


@dataclass(frozen=True, slots=True)
class Run:
    """A run on this machine.

    Attributes:
        name: Of its folder, or of the file.
        file: Its weights.
        spec: Its job; None: only a file of weights is there.
        summary: Content of its summary.json; empty: there is none.
    """

    name: str
    file: Path
    spec: JobSpec | None
    summary: dict[str, Any]

    def open(self) -> Opened:
        """Open the model; raises ConfigError, CheckpointError."""
        from atoll.export.opened import open_model

        return open_model(self.file, spec=self.spec)

    def card(self, opened: Opened, *, adapter: bool) -> str:
        """Return the README.md of the exported model."""
        from atoll.export.card import model_card

        return model_card(
            self.name, base=opened.base, spec=self.spec, summary=self.summary, adapter=adapter
        )


def find_run(where: Path) -> Run:
    """Find the files of a run; raises ConfigError if there is no trained model."""
    from atoll.config import load_spec

    file = find_model(where)
    folder = file.parent
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    job, results = folder / "job.toml", folder / "summary.json"
    summary: dict[str, Any] = json.loads(results.read_text("utf-8")) if results.is_file() else {}
    spec = load_spec(job) if job.is_file() else None
    return Run(folder.resolve().name if spec else file.stem, file, spec, summary)
