"""`atoll demo`: a complete training run on one machine, in about two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    nodes: Annotated[int | None, typer.Option(min=1, help="How many nodes.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, e.g. train.steps=300.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
    picture: Annotated[
        Path | None, typer.Option(help="Also save the terminal output as an animated SVG file.")
    ] = None,
) -> None:
    """Train a small GPT on four nodes of this machine, in about two minutes on two cores."""
    from atoll.cli.jobs.jobfile import Overrides, demo_text, parse_text
    from atoll.cli.jobs.local import LocalRun, new_folder, run_local
    from atoll.cli.jobs.precheck import check_names
    from atoll.cli.picture import Picture
    from atoll.cli.views import screen

    overrides = Overrides(nodes=nodes, settings=set_ or ())
    submission = parse_text(demo_text(), overrides, name="demo.toml")
    parameters = check_names(submission.spec)
    plan = LocalRun(
        folder=new_folder(runs),
        jobs=runs,
        nodes=submission.spec.job.nodes,
        submissions=[submission],
        parameters=parameters,
        picture=Picture(picture, command="atoll demo") if picture else None,
    )
    raise typer.Exit(run_local(plan, console=screen.output()))
