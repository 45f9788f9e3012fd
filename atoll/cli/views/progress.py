"""How far a job is: its bar and its figures, for the live view and for `atoll status JOB`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.cli.views.job import Watched


def bar(job: Watched) -> RenderableType:
    """Return the share of the steps that is done; without a known total, the steps."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    if not job.steps:
        return Text(f"step {job.step:,}")
    text = f"{job.step / job.steps:4.0%}  step {job.step:,}/{job.steps:,}"
    if not job.ended:
        text += f"  ETA {screen.duration(job.left_s)}"
    row.add_row(ProgressBar(total=job.steps, completed=job.step), text)
    return row


def figures(job: Watched) -> RenderableType:
    """Return loss, speed, rounds and traffic; what the job does not measure is left out."""
    row = Table.grid(padding=(0, 3))
    shown = {
        "loss": None if job.loss is None else f"{job.loss:.3f}",
        "held-out": None if job.held_out is None else f"{job.held_out:.3f}",
        "tokens/s": screen.count(job.tokens_per_s) if job.tokens_per_s else None,
        "rounds": str(rounds) if (rounds := job.view.get("committed_round", 0)) else None,
    }
    row.add_row(*(f"[dim]{name}[/] [bold]{text}[/]" for name, text in shown.items() if text))
    if not (job.sent_bytes or job.data_parallel_bytes):
        return row
    traffic = Text.from_markup(f"[dim]sent per node[/] [bold]{screen.size(job.sent_bytes)}[/]")
    other = job.data_parallel_bytes
    if other:
        times = f"  ({other / job.sent_bytes:,.0f} x less)" if job.sent_bytes else ""
        traffic.append_text(
            Text.from_markup(f" [dim]against[/] {screen.size(other)} [dim]by data parallel[/]")
        )
        traffic.append(times, style="bold green")
    return Group(row, traffic)
