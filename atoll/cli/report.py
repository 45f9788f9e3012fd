"""`atoll report`: build the report of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, runs/JOB.")],
) -> None:
    """Write report.html again from the files of a run."""
    from atoll.cli import screen
    from atoll.errors import ConfigError
    from atoll.train.report import write_report

    if not (folder / "summary.json").exists():
        raise ConfigError(
            "this is not the folder of a finished run",
            given=str(folder),
            expected="a folder with summary.json, e.g. runs/JOB",
        )
    path = write_report(folder)
    screen.output().print(f"wrote {screen.shown(path)}", soft_wrap=True, markup=False)
