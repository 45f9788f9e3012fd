"""Collect the results of a job in runs/JOB/ and show them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from atoll import config
from atoll.cli.views import screen
from atoll.errors import WireError
from atoll.net.http.client import HubClient
from atoll.net.http.streams import measure
from atoll.wire.manifest import MANIFEST_NAME

P = TypeVar("P", bound=PurePath)

ARTIFACTS = "artifacts/"
"""Folder of the files that a job's processes left, as `artifacts/MEMBER/PATH`."""

EPISODES = "episodes/"
"""Folder with a recorded episode of each policy."""

WANTED = (
    "job.toml", "metrics.jsonl", "events.jsonl", "rounds.json", "model.safetensors",
    "router.safetensors", "features.safetensors", "path-*.safetensors",
    "paths*.safetensors",
)  # fmt: skip
"""Patterns of files fetched from a remote hub; checkpoints stay there."""


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a job's folder."""
    complete = sorted((folder / "checkpoints").glob(f"*/{MANIFEST_NAME}"))
    return complete[-1].parent if complete else None


def fetch(client: HubClient, job: str, folder: Path, *, everything: bool = False) -> list[str]:
    """Fetch a job's files for report and model, and its artifacts; return the names.

    A file that is here already with the same content is not fetched again.

    Args:
        client: The hub.
        job: Which job.
        folder: Where the files go; created if missing.
        everything: All files of the job.

    Raises:
        StorageFull: the disk is full.
        CheckpointCorrupt: a file arrived damaged.
        WireError: the hub names a path outside the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for file in client.files(job):
        wanted = any(fnmatchcase(file.name, pattern) for pattern in WANTED)
        if everything or wanted or file.name.startswith((ARTIFACTS, EPISODES)):
            target = _inside(folder, file.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (file.sha256 and target.is_file() and measure(target)[0] == file.sha256):
                client.get_file(job, file.name, target, sha256=file.sha256)
            names.append(file.name)
    return names


def _inside(folder: P, name: str) -> P:
    """Return the path of a file in a folder, checked to stay inside."""
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    outside = not path.is_relative_to(folder)  # on Windows a part may name another drive
    wrong = outside or any(part in (".", "..") or "\\" in part for part in parts)
    if not parts or name.startswith("/") or wrong:
        raise WireError("the hub names a file that cannot be stored", given=repr(name))
    return path


def came_to_something(view: Mapping[str, Any]) -> bool:
    """Return whether a failed job has results: other policies continue when one fails."""
    return view.get("kind") == "rl" and any(member.get("result") for member in view["members"])


def finish(folder: Path, *, view: Mapping[str, Any], console: Console) -> None:
    """Write summary and report of an ended job, and show them."""
    results = results_of(view)
    if not results:  # a program that never joined its job
        console.print(f"its files are in {escape(screen.shown(folder))}", soft_wrap=True)
        return
    summary = write(folder, view=view, results=results)
    from atoll.train.results.summary import best_sample

    if "rl" in summary:
        from atoll.cli.views.rl import rl_table

        console.print(rl_table(summary))
    else:
        console.print(summary_table(summary))
    sample = best_sample(results)
    if sample:
        console.print(
            Panel(escape(sample), title="what the model writes", title_align="left"),
            soft_wrap=True,
        )
    spec = config.parse_spec(str(view["spec"]), name="the job")
    evaluated = summary.get("accuracy") is None and summary.get("loss_final") is not None
    next_ = "chat {}" if spec.tune.active else "generate {} --prompt 'def '"
    _say_files(console, folder, next_=next_ if evaluated and ":" not in spec.model.name else "")


def results_of(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each member that has ended reported."""
    return {
        member["member"]: member["result"] for member in view["members"] if member.get("result")
    }


def write_if_measured(folder: Path, *, view: Mapping[str, Any]) -> Path | None:
    """Write summary and report of a job in any state; None: it has measured nothing."""
    metrics, results = folder / "metrics.jsonl", results_of(view)
    if not results and not (metrics.is_file() and metrics.stat().st_size):
        return None
    write(folder, view=view, results=results)
    return folder / "report.html"


def write(
    folder: Path, *, view: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Write summary.json and report.html; return the summary."""
    from atoll.train.report.report import write_report
    from atoll.train.results.summary import Rounds, read_lines, summarise, write_summary

    summary = summarise(
        job=str(view["job"]),
        spec=config.parse_spec(str(view["spec"]), name="the job"),
        results=results,
        points=read_lines(folder / "metrics.jsonl"),
        rounds=Rounds(int(view["committed_round"]), int(view["aborted_rounds"])),
        paths=view.get("paths"),
        shown=view["members"],
    )
    summary |= {"state": str(view.get("state") or ""), "reason": str(view.get("reason") or "")}
    write_summary(folder, summary)
    write_report(folder)
    return summary


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the summary as a table."""
    strategy = summary["strategy"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    parts = ("inner", "outer", "codec")
    words = [f"{name} {word}" for name, word in strategy.items() if name not in parts]
    names = ", ".join([" x ".join(str(strategy[part]) for part in parts), *words])
    rows = {
        "strategy": escape(names),
        "nodes": str(summary["nodes"]),
        "steps": f"{summary['steps']:,}",
        "tokens": screen.count(summary["tokens"]) if summary["tokens"] else "",
        "rounds": f"{summary['rounds_committed']} committed, {summary['rounds_aborted']} aborted",
        "held-out loss": _from_to(summary) if summary.get("loss_final") is not None else "",
        "steps took": _time(summary),
        "tokens/s": _rate(summary),
        "sent per node": _traffic(summary),
        "replicas identical": _identical(summary),
    }
    if summary.get("accuracy") is not None:
        rows["accuracy"] = f"{summary['accuracy']:.1%} of the held-out images"
    account = summary.get("data") or {}
    if account.get("missed"):
        missed = f"{account['missed']} of {account['missed'] + account['committed']} samples"
        rows["data"] = f"[red]{missed} are in no committed round[/]"
    if not summary.get("same_data", True):
        rows["data"] = "[red]members read different data[/]: compare their Python and files"
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def _rate(summary: Mapping[str, Any]) -> str:
    if not summary["tokens"]:
        return ""  # of a script that counts none
    rate, alone = summary["tokens_per_s"] or 0, summary["best_single_node_tokens_per_s"]
    if alone is None and summary["strategy"]["inner"] == "swarm":
        return f"{screen.count(rate)} (all stages together, no node trains alone)"
    return f"{screen.count(rate)} (best node alone {screen.count(alone or 0)})"


def _identical(summary: Mapping[str, Any]) -> str:
    identical, note = summary["replicas_identical"], escape(summary.get("replicas_note") or "")
    if identical is None:
        return note or "unknown"
    if not identical and summary["strategy"]["outer"] == "alone":
        return "no, on purpose"
    word = "yes" if identical else "[red]NO[/]"
    return f"{word} ({note})" if note else word


def _time(summary: Mapping[str, Any]) -> str:
    share = summary.get("utilisation")
    computing = f", {share:.1%} of it computing" if share is not None else ""
    return screen.duration(summary["wall_s"]) + computing


def _traffic(summary: Mapping[str, Any]) -> str:
    sent = screen.size(summary["bytes_sent_per_node"] or 0)
    times, other = summary.get("reduction"), summary.get("bytes_sent_ddp_fp32")
    if not times or not other:
        return sent
    return f"{sent}, {times:,.0f} x less than data parallel ({screen.size(other)})"


def _from_to(summary: Mapping[str, Any]) -> str:
    losses = (summary.get("loss_first"), summary.get("loss_final"))
    numbers = [f"{value:.3f}" for value in losses if value is not None]
    return f"{' -> '.join(numbers)} {summary.get('loss_unit', '')}".rstrip()


def _say_files(console: Console, folder: Path, *, next_: str) -> None:
    """Print where the files are, and the command that tries out a language model."""
    where = escape(screen.shown(folder))
    console.print(f"report   {where}/report.html", soft_wrap=True)
    if (folder / EPISODES).is_dir():
        console.print(f"episodes {where}/{EPISODES}*.gif", soft_wrap=True)
    if (folder / "model.safetensors").exists():
        console.print(f"model    {where}/model.safetensors", soft_wrap=True)
        if next_:
            console.print(f"         atoll {next_.format(where)}", soft_wrap=True)
