"""`atoll resume`: continue a job from its newest undamaged checkpoint, or a chosen one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def resume(
    job: Annotated[
        str,
        typer.Argument(help="A job of the hub, a folder runs/JOB, or the beginning of its name."),
    ],
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-n", min=1, help="Resume with this number of members.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Resume with another strategy, e.g. ddp.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, e.g. train.steps=4000.")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Round or folder of the checkpoint, see `atoll checkpoint list JOB`; later ones "
            "are deleted. start: step 0. Default: the newest that is not damaged."
        ),
    ] = "",
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach/--follow", help="Resume and return at once.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
) -> None:
    """Resume a job that was stopped, failed or interrupted.

    Model, data, seed and script stay the same; members and strategy may change.

    A damaged checkpoint is passed over: the job continues from the newest good one and reports what
    was damaged and how many steps are lost.
    """
    from atoll.cli.checkpoint_place import chosen_round
    from atoll.cli.jobs.embedded import recall_embedded
    from atoll.cli.jobs.jobfile import change_for_resume
    from atoll.cli.jobs.names import job_named, local_run
    from atoll.cli.jobs.precheck import check_names
    from atoll.cli.views import screen
    from atoll.config import parse_spec

    console, chosen = screen.output(), chosen_round(checkpoint)
    folder = None if hub else local_run(job, runs)
    local = recall_embedded(folder) if folder else None
    if folder is not None and local is not None:
        from atoll.cli.jobs.local import LocalRun, run_local

        place, before = local
        text = (folder / "job.toml").read_text(encoding="utf-8")
        changed = change_for_resume(text, nodes=nodes, preset=preset, settings=set_ or ())
        spec = parse_spec(changed or text)
        parameters = check_names(spec)
        here = nodes * spec.island.machines if nodes else before
        plan = LocalRun(
            folder=place, jobs=folder.parent, nodes=here, resume=folder.name,
            changed=changed, checkpoint=chosen, parameters=parameters,
        )  # fmt: skip
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import hub_access
    from atoll.cli.jobs.remote import follow_remote

    where = hub_access.find(hub)
    with where.client() as client:
        name = job_named(client, Path(job).name)
        text = str(client.job(name)["spec"])
        changed = change_for_resume(text, nodes=nodes, preset=preset, settings=set_ or ())
        if changed:
            check_names(parse_spec(changed))
        name = client.resume(name, spec=changed, checkpoint=chosen)
    raise typer.Exit(follow_remote(where, name, runs=runs, detach=detach, console=console))
