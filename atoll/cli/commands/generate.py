"""`atoll generate`: text from a trained model; `atoll report`: rebuild the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    where: Annotated[Path, typer.Argument(help="runs/JOB, or a .safetensors file.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Prompt to continue.")] = "\n",
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", min=1, help="Number of tokens to generate.")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.8,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; the same seed gives the same text.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Computes: auto (an accelerator if there is one), cpu, cuda:1 ...")
    ] = "auto",
) -> None:
    """Generate text with a trained model."""
    import secrets

    from atoll.cli.model_file import find_model
    from atoll.cli.views.screen import harmless

    path = find_model(where)
    chosen = seed if seed is not None else secrets.randbelow(2**31)
    from atoll.devices.choose import choose  # seconds: torch
    from atoll.train.results.sample import load_model, write_text

    model, tokenizer = load_model(path)
    model.to(choose(device))
    text = write_text(model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=chosen)
    typer.echo(harmless(text))


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, runs/JOB.")],
) -> None:
    """Write report.html again from the files of a run."""
    from atoll.cli.views import screen
    from atoll.errors import ConfigError
    from atoll.train.report.report import write_report

    if not (folder / "summary.json").exists():
        raise ConfigError(
            "this is not the folder of a finished run",
            given=str(folder),
            expected="a folder with summary.json, e.g. runs/JOB",
        )
    path = write_report(folder)
    screen.output().print(f"wrote {screen.shown(path)}", soft_wrap=True, markup=False)
