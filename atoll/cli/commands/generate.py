"""`atoll generate`: text from a trained model; `atoll report`: rebuild the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.routing.writing import Sampling


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
    paths: Annotated[
        bool, typer.Option("--paths", help="WHERE is a run with [dipaco]: route the prompt.")
    ] = False,
    shards: Annotated[
        Path | None,
        typer.Option(help="With --paths: file of `atoll paths shard`, if WHERE has no router."),
    ] = None,
    path: Annotated[
        int | None, typer.Option(min=0, help="With --paths: this path instead of the router's.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="With --paths: choose a path again after this many tokens."),
    ] = None,
) -> None:
    """Generate text with a trained model, or with the path of a modular model that fits best."""
    import secrets

    from atoll.cli.model_file import find_model
    from atoll.cli.views.screen import harmless

    chosen = seed if seed is not None else secrets.randbelow(2**31)
    from atoll.devices.choose import choose  # seconds: torch

    if paths:
        from atoll.routing.writing import Sampling

        sampling = Sampling(
            tokens=tokens, temperature=temperature, seed=chosen, every=every, path=path
        )
        _by_path(where, shards, prompt, sampling, device)
        return
    if path is not None or every is not None or shards is not None:
        raise typer.BadParameter("--path, --every and --shards are for paths: add --paths")
    file = find_model(where)
    from atoll.train.results.sample import load_model, write_text

    model, tokenizer = load_model(file)
    model.to(choose(device))
    text = write_text(model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=chosen)
    typer.echo(harmless(text))


def _by_path(
    where: Path, shards: Path | None, prompt: str, sampling: Sampling, device: str
) -> None:
    """Route a prompt, load its path only, and write its text; the paths are named on stderr."""
    from atoll.cli.views import screen
    from atoll.devices.choose import choose
    from atoll.routing.folder import open_paths
    from atoll.routing.writing import continue_text

    paths, chosen = open_paths(where, shards=shards), choose(device)
    written = continue_text(
        paths, paths.tokenizer.encode(prompt.encode("utf-8")), sampling,
        prepare=lambda model: model.to(chosen),
    )  # fmt: skip
    said = ", ".join(str(path) for path in written.paths)
    screen.errors().print(f"path {said} of {paths.num_paths}", style="dim", soft_wrap=True)
    text = paths.tokenizer.decode(written.ids).decode("utf-8", errors="replace")
    typer.echo(screen.harmless(text))


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
