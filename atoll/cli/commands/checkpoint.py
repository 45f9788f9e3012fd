"""`atoll checkpoint`: list, verify, export and import checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.wire.manifest import Manifest

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A folder runs/JOB, a job of the hub, or a URL.")
]
RoundOption = Annotated[
    int, typer.Option("--round", help="Round of the checkpoint (default: the newest).")
]
RunsOption = Annotated[Path, typer.Option(help="Folder where results are collected.")]
HubOption = Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    help="List, check, export and import checkpoints.",
)


@app.command("list")
def list_(job: JobArgument, runs: RunsOption = Path("runs"), hub: HubOption = "") -> None:
    """List the checkpoints of a job.

    Examples:
      atoll checkpoint list runs/gpt-1121-0a
      atoll checkpoint list s3://bucket/runs/gpt-1121-0a
    """
    from atoll.cli.checkpoint_place import find
    from atoll.cli.views import screen

    place = find(job, runs=runs, hub=hub)
    screen.output().print(_table(place.manifests()))


@app.command("show")
def show(
    job: JobArgument,
    round_: RoundOption = -1,
    runs: RunsOption = Path("runs"),
    hub: HubOption = "",
) -> None:
    """Show the parts of one checkpoint.

    Example: atoll checkpoint show runs/gpt-1121-0a --round 12
    """
    from atoll.cli.checkpoint_place import choose, find
    from atoll.cli.views import screen

    place = find(job, runs=runs, hub=hub)
    for drawn in _details(choose(place, round_)):
        screen.output().print(drawn)


@app.command("verify")
def verify(
    job: JobArgument,
    round_: Annotated[int, typer.Option("--round", help="Round to check (default: all).")] = -1,
    runs: RunsOption = Path("runs"),
    hub: HubOption = "",
) -> None:
    """Verify every part of every checkpoint against the hashes in its manifest.

    Exits with status 1 when a part is missing or damaged, after naming all of them.

    Example: atoll checkpoint verify runs/gpt-1121-0a
    """
    import tempfile

    from atoll.cli.checkpoint_place import choose, find
    from atoll.cli.views import screen
    from atoll.errors import CheckpointCorrupt

    place, console, damaged = find(job, runs=runs, hub=hub), screen.output(), 0
    newest = choose(place, round_)
    chosen = {newest.round: newest} if round_ >= 0 else place.manifests()
    for number, manifest in chosen.items():
        bad = 0
        for part in manifest.parts:
            with tempfile.TemporaryDirectory(prefix="atoll-verify-") as scratch:
                try:
                    place.part(number, part.name, Path(scratch))
                except CheckpointCorrupt as error:
                    screen.show_error(error)
                    bad += 1
        state = f"[red]{bad} of {len(manifest.parts)} parts damaged[/]" if bad else "good"
        console.print(f"round {number}: {state}")
        damaged += bad
    if damaged:
        raise typer.Exit(1)


@app.command("export")
def export(
    job: JobArgument,
    target: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.safetensors"),
    round_: RoundOption = -1,
    runs: RunsOption = Path("runs"),
    hub: HubOption = "",
) -> None:
    """Write the weights of a checkpoint as plain safetensors, which any program reads.

    Sharded checkpoints become one file, too.

    Examples:
      atoll checkpoint export runs/gpt-1121-0a gpt.safetensors
      atoll checkpoint export gpt-1121-0a --round 40 --hub http://10.0.0.5:7700
    """
    import tempfile

    from atoll.cli.checkpoint_place import LocalPlace, choose, find
    from atoll.cli.views import screen
    from atoll.errors import ConfigError
    from atoll.wire.manifest import SHARED_PART

    place = find(job, runs=runs, hub=hub)
    manifest = choose(place, round_)
    texts = {"job": manifest.job, "round": str(manifest.round), "step": str(manifest.step)}
    if all(part.name != SHARED_PART for part in manifest.parts):
        from atoll.checkpoint.sharded import export_sharded

        if not isinstance(place, LocalPlace):
            raise ConfigError(
                "a sharded checkpoint can be exported from a local folder only", given=place.name,
                expected="a folder runs/JOB", remedy=f"first: atoll checkpoint import {job}",
            )  # fmt: skip
        export_sharded(place.folder, manifest.round, target, texts=texts)
    else:
        from atoll.checkpoint.portable import export_weights

        with tempfile.TemporaryDirectory(prefix="atoll-export-") as scratch:
            shared = place.part(manifest.round, SHARED_PART, Path(scratch))
            export_weights(shared, target, texts=texts)
    size = screen.size(target.stat().st_size)
    text = f"round {manifest.round} -> {target} ({size})"
    screen.output().print(text, soft_wrap=True, markup=False)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(help="A URL or folder with copies, a job, or a .safetensors file.")
    ],
    into: Annotated[
        str, typer.Option("--into", help="Name below runs/ (default: that of the job or file).")
    ] = "",
    round_: RoundOption = -1,
    runs: RunsOption = Path("runs"),
    hub: HubOption = "",
) -> None:
    """Bring a checkpoint, or plain weights, into a folder runs/JOB.

    A checkpoint comes with all its parts, verified, and can be resumed: beside the hub that knows
    the job by `atoll resume JOB`, in a script of your own by `atoll.checkpoint.resume`. Plain
    weights become a checkpoint of round 0.

    Examples:
      atoll checkpoint import s3://bucket/runs/gpt-1121-0a
      atoll checkpoint import gpt.safetensors --into start
    """
    from atoll.cli.views import screen

    if Path(source).is_file():
        folder, number = _import_file(Path(source), into=into, runs=runs)
    else:
        folder, number = _import_checkpoint(source, into=into, round_=round_, runs=runs, hub=hub)
    where = f"{screen.shown(folder)}, round {number}"
    screen.output().print(f"{source} -> {where}", soft_wrap=True, markup=False)


def _import_file(source: Path, *, into: str, runs: Path) -> tuple[Path, int]:
    """Make a checkpoint of plain weights."""
    from atoll.checkpoint.portable import import_weights
    from atoll.checkpoint.stores.folder import Folder
    from atoll.errors import ConfigError

    folder = runs / (into or source.stem)
    if Folder(folder).complete():
        raise ConfigError(
            "the job has checkpoints already", given=str(folder),
            expected="a new name", remedy="give one with --into NAME",
        )  # fmt: skip
    return folder, import_weights(source, folder).round


def _import_checkpoint(
    source: str, *, into: str, round_: int, runs: Path, hub: str
) -> tuple[Path, int]:
    """Fetch all parts of a checkpoint, the manifest last."""
    from atoll.checkpoint.files import write_file
    from atoll.cli.checkpoint_place import RemotePlace, choose, find
    from atoll.errors import AtollError
    from atoll.net.http.streams import blocks
    from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder, encode_manifest
    from atoll.wire.part_check import check_part

    place = find(source, runs=runs, hub=hub)
    manifest = choose(place, round_)
    folder = runs / (into or manifest.job)
    target = folder / checkpoint_folder(manifest.round)
    target.mkdir(parents=True, exist_ok=True)
    for part in manifest.parts:
        try:
            check_part(target / part.name, part, round_=manifest.round)
        except AtollError:
            found = place.part(manifest.round, part.name, target)
            if found != target / part.name:
                write_file(target / part.name, blocks(found))
            check_part(target / part.name, part, round_=manifest.round)
    write_file(target / MANIFEST_NAME, [encode_manifest(manifest)])
    if isinstance(place, RemotePlace) and not (folder / "job.toml").exists():
        toml = place.remote.read("job.toml")
        if toml is not None:
            write_file(folder / "job.toml", [toml])
    return folder, manifest.round


def _table(manifests: dict[int, Manifest]) -> RenderableType:
    """Return checkpoints as a table."""
    from rich.table import Table

    from atoll.cli.views import screen

    if not manifests:
        return "no checkpoint is complete yet"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("round", "step", "members", "parts", "size", "held-out loss", "written"):
        table.add_column(heading)
    for round_, manifest in manifests.items():
        table.add_row(
            str(round_),
            str(manifest.step),
            str(len(manifest.members)),
            str(len(manifest.parts)),
            screen.size(sum(part.nbytes for part in manifest.parts)),
            f"{manifest.score:.4f}" if manifest.score is not None else "-",
            screen.moment(manifest.created),
        )
    return table


def _details(manifest: Manifest) -> list[RenderableType]:
    """Return one checkpoint in detail."""
    from rich.markup import escape
    from rich.table import Table

    from atoll.cli.views import screen

    head = Table.grid(padding=(0, 2))
    loss = f"{manifest.score:.4f}" if manifest.score is not None else "not measured"
    rows = {
        "job": manifest.job,
        "round": str(manifest.round),
        "step": str(manifest.step),
        "members": ", ".join(manifest.members) or "none: weights only",
        "held-out loss": loss,
        "written": screen.moment(manifest.created),
        "by": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    for name, text in rows.items():
        head.add_row(name, escape(text))
    parts = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("part", "of", "size", "SHA-256"):
        parts.add_column(heading)
    for part in manifest.parts:
        parts.add_row(
            escape(part.name), part.member or "-", screen.size(part.nbytes), part.sha256[:16]
        )
    return [head, "", parts]
