"""`atoll paths`: shard a corpus for a modular model, and score texts with its paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Paths of a modular model (DiPaCo): shards, routed evaluation.")


@app.command()
def shard(
    job: Annotated[Path, typer.Argument(help="A job file: its [data] and seed are used.")],
    modules: Annotated[
        str, typer.Option("--modules", "-m", help="Modules of each level, e.g. 2,2: four paths.")
    ],
    out: Annotated[Path, typer.Option(help="The shards; the router goes beside them.")] = Path(
        "paths.safetensors"
    ),
    reader: Annotated[
        Path | None,
        typer.Option(help="Small model of features: runs/JOB, or a file (default: train one)."),
    ] = None,
    reader_steps: Annotated[
        int, typer.Option(min=1, help="Steps of the small model that is trained by default.")
    ] = 300,
    prefix: Annotated[
        int, typer.Option(min=1, help="First tokens of a document, which choose its path.")
    ] = 32,
    longest: Annotated[
        int, typer.Option(min=2, help="Longer texts are cut into pieces of at most these tokens.")
    ] = 1024,
    copies: Annotated[int, typer.Option(min=1, help="Paths that train on each document.")] = 2,
    slack: Annotated[
        float, typer.Option(min=1.0, help="Largest shard, as a multiple of an even one.")
    ] = 1.25,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-n", min=1, help="Share the work on nodes of a hub.")
    ] = None,
    local: Annotated[
        int | None, typer.Option(min=1, help="Share the work among this many processes here.")
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    runs: Annotated[
        Path, typer.Option(help="With several: the shards come to RUNS/JOB/paths.safetensors.")
    ] = Path("runs"),
) -> None:
    """Assign the documents of a corpus to paths, by what their first tokens look like.

    What is computed is kept in OUT.parts/: after Ctrl+C the same command continues. With --nodes
    it is a job of a hub, which kills and restarts do not set back; every node needs the corpus.
    """
    from atoll.cli.jobs import sharding
    from atoll.routing.shard import Shards

    options = Shards(
        modules=sharding.counts_of(modules), prefix=prefix, longest=longest, copies=copies,
        slack=slack, reader_steps=reader_steps,
    )  # fmt: skip
    many = nodes or local
    if many is None:
        raise typer.Exit(sharding.shard_here(job, options, out=out, reader=reader))
    if reader is not None:
        raise typer.BadParameter("--reader is for one machine: several train the small model")
    from atoll.cli.views import screen

    submission, console = sharding.shard_job(job, options, nodes=many), screen.output()
    if local is not None:
        from atoll.cli.jobs.local import LocalRun, new_folder, run_local

        plan = LocalRun(
            folder=new_folder(runs), jobs=runs, nodes=local, submissions=[submission], parameters=0
        )
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import hub_access
    from atoll.cli.jobs.remote import RemoteRun, run_remote

    wanted = RemoteRun(submissions=[submission], runs=runs)
    raise typer.Exit(run_remote(hub_access.find(hub), wanted, target=job, console=console))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="runs/JOB of a job with [dipaco].")],
    data: Annotated[
        str, typer.Argument(help="Corpus to score, e.g. files:GLOB (default: what RUN held out).")
    ] = "",
    every: Annotated[
        int, typer.Option(min=1, help="Choose a path again after this many tokens.")
    ] = 64,
    shards: Annotated[
        Path | None, typer.Option(help="File of `atoll paths shard`, if RUN has no router.")
    ] = None,
    longest: Annotated[
        int, typer.Option(min=2, help="Longer texts are cut into pieces of at most these tokens.")
    ] = 1024,
    device: Annotated[str, typer.Option(help="Computes: auto, cpu, cuda:1 ...")] = "auto",
) -> None:
    """Score texts with the paths of a finished run, routed once and again every few tokens.

    A path is chosen from the text before what it scores; a text's prefix is never scored.
    """
    from atoll.cli.jobs.routed import Scoring, score_run

    score_run(run, Scoring(data=data, every=every, shards=shards, longest=longest, device=device))
