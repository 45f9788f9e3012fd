"""`atoll tune`: fine-tune a pretrained model on examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.data.tuning.dataset import ExampleSet


def tune(
    model: Annotated[
        str,
        typer.Argument(help="A folder, a .gguf file, package:NAME, or a Hugging Face name."),
    ],
    data: Annotated[
        list[str],
        typer.Argument(
            help="Examples: .jsonl, .json, .parquet, .csv, .txt, .md, or .tar (WebDataset); "
            "globs, too; or hub:OWNER/NAME, a data set of the Hugging Face hub."
        ),
    ],
    method: Annotated[str, typer.Option(help="lora, dora, qlora or full.")] = "lora",
    objective: Annotated[
        str,
        typer.Option(
            help="answers; dpo: prefer chosen to rejected answers; kto: good to bad ones."
        ),
    ] = "answers",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    context: Annotated[int, typer.Option(min=8, help="Longest example, in tokens.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step of each member.")] = 8,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate: 2e-4; of the full method 2e-5.")
    ] = None,
    passes: Annotated[
        float, typer.Option(min=0.001, help="Passes over the data, by all members together.")
    ] = 1.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each member, in place of --passes.")
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(help="How often each DATA comes in a pass; as many as there are DATA."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Only records of which this is true: 'score >= 4'. Repeatable."),
    ] = None,
    template: Annotated[
        str, typer.Option(help="Chat template: a Jinja file, or chatml (default: the model's).")
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Number of members.")] = 1,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE, e.g. tune.pack=false.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Report on the data and print the job; train nothing.")
    ] = False,
    local: Annotated[
        int | None, typer.Option(min=1, help="Run on this machine only, with this number of nodes.")
    ] = None,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach/--follow", help="Submit and return at once.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder where results are collected.")] = Path("runs"),
) -> None:
    """Fine-tune a model on examples, on a hub's nodes or on this machine.

    Only adapters travel and are saved: a few MB per round. The files of DATA are sent to the
    members; the model is loaded on each of them. The adapters are collected in runs/JOB.
    """
    from atoll.cli.tuning.job import TuningOptions, tuning_job
    from atoll.cli.views import screen

    options = TuningOptions(
        model=model, data=data, weights=weight or (), method=method, objective=objective, rank=rank,
        context=context,
        batch=batch, lr=lr, steps=steps, passes=passes, template=template, nodes=local or nodes,
        keep=keep or (), settings=set_ or (),
    )  # fmt: skip
    console = screen.output()
    with console.status("reading the examples ...") as status:
        submission, found, text = tuning_job(
            options, progress=lambda records: status.update(f"reading the examples ... {records}")
        )
    _report(found, nodes=options.nodes)
    if check:
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
        return
    from atoll.cli.jobs.precheck import check_names

    parameters = check_names(submission.spec, here=local is not None)
    if local is not None:
        from atoll.cli.jobs.local import LocalRun, new_folder, run_local

        plan = LocalRun(
            folder=new_folder(runs), jobs=runs, nodes=local, submissions=[submission],
            parameters=parameters,
        )  # fmt: skip
        raise typer.Exit(run_local(plan, console=console))
    from atoll.cli import hub_access
    from atoll.cli.jobs.remote import RemoteRun, run_remote

    remote = RemoteRun(
        submissions=[submission], each=False, runs=runs, detach=detach, parameters=parameters
    )
    raise typer.Exit(
        run_remote(
            hub_access.find(hub, without=hub_access.ALONE),
            remote,
            target=Path(model),
            console=console,
        )
    )


def _report(found: ExampleSet, *, nodes: int) -> None:
    """Print what is in the data, and one example."""
    from atoll.cli.views import screen

    console = screen.output()
    for line in found.quality.sentences():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows, held_out = len(found.train), len(found.held_out)
    members = "" if nodes == 1 else f", {rows // nodes} for each of {nodes} members"
    console.print(f"{rows} rows to train on{members}; {held_out} rows held out", markup=False)
