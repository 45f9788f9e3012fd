"""`atoll evaluate`: a trained model's loss and perplexity on files, and tasks of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    where: Annotated[Path, typer.Argument(help="runs/JOB, or a .safetensors file.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Examples: .jsonl, .json, .parquet, .csv, .txt or .md; globs, too."),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval in place of examples, e.g. hellaswag,arc_easy.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Examples of each task (default: all).")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with further tasks as YAML.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=8, help="Longest example, in tokens (default: the run's).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows computed at once.")] = 8,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Count prompts too, not only answers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    device: Annotated[
        str, typer.Option(help="Computes: auto (an accelerator if there is one), cpu, cuda:1 ...")
    ] = "auto",
) -> None:
    """Measure how well a trained model predicts examples, or does tasks of lm-eval.

    Examples are read as `atoll tune` reads them; all are used, also equal ones: loss and
    perplexity. Tasks need `pip install lm-eval`, and their data.
    """
    if bool(data) == bool(tasks):
        raise typer.BadParameter("either DATA or --tasks")
    from atoll.cli.trained.run_files import find_run
    from atoll.cli.views import screen
    from atoll.data.tuning.options import ExampleOptions
    from atoll.devices.choose import choose
    from atoll.export.perplexity import measure

    run = find_run(where)
    opened = run.open()
    if tasks:
        from atoll.export.tasks import measure_tasks

        with screen.errors().status("computing ..."):
            results = measure_tasks(
                opened, [name.strip() for name in tasks.split(",") if name.strip()], batch=batch,
                device=choose(device), limit=limit, folder=task_folder,
            )  # fmt: skip
        _say_tasks(results, as_json=as_json)
        return
    assert data
    options = ExampleOptions(
        data=data, context=context or int(opened.weights.options.get("context", 512)), seed=0,
        completion_only=not prompts, deduplicate=False,
    )  # fmt: skip
    with screen.errors().status("computing ...") as status:
        found = measure(
            opened, options, batch=batch, device=choose(device),
            progress=lambda rows: status.update(f"computing ... {rows} rows"),
        )  # fmt: skip
    if as_json:
        fields = {
            "loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens,
            "examples": found.examples,
        }  # fmt: skip
        typer.echo(json.dumps(fields))
        return
    screen.output().print(
        f"{found.examples} examples, {found.tokens} tokens: loss {found.loss:.4f} nats per token, "
        f"perplexity {found.perplexity:.3f}",
        soft_wrap=True,
    )


def _say_tasks(results: Mapping[str, Mapping[str, float]], *, as_json: bool) -> None:
    from rich.table import Table

    from atoll.cli.views import screen

    if as_json:
        typer.echo(json.dumps(results))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("task", "measure", "value", "±"):
        table.add_column(heading, justify="left" if heading in ("task", "measure") else "right")
    for task, figures in results.items():
        for name, value in figures.items():
            if not name.endswith("_stderr"):
                error = figures.get(f"{name}_stderr")
                table.add_row(task, name, f"{value:.4f}", "-" if error is None else f"{error:.4f}")
    screen.output().print(table)
