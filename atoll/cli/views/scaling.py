"""Terminal output of a fitted scaling law, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from atoll.scaling.fit import Fit
    from atoll.scaling.optimum import Optimum
    from atoll.scaling.predict import Prediction
    from atoll.scaling.rates import RateLaw

COMBINATIONS = 12
"""Lines of the table of runs; a larger sweep shows its largest runs."""


def page(
    fit: Fit,
    *,
    skipped: Sequence[str],
    rates: Sequence[RateLaw],
    predictions: Sequence[Prediction],
    optima: Sequence[Optimum],
) -> Iterator[RenderableType]:
    """Yield the output: the law, its constants, what checks it, and what was requested."""
    yield f"{fit.law.title} = {fit.law.equation}"
    yield f"[dim]{len(fit.points)} runs; params: {escape(fit.counted)}[/]"
    yield _constants(fit)
    yield _runs(fit)
    yield from _checks(fit)
    for rate in rates:
        yield (
            f"best {rate.name} = {rate.factor:.4g} N^{rate.a:.3g} M^{rate.m:.3g}, "
            f"from {len(rate.best)} sizes and members, {rate.error:.0%} off on average"
        )
        yield from (f"  [dim]{escape(note)}[/]" for note in rate.notes)
    for one in predictions:
        at = ", ".join(f"{name} {value:.4g}" for name, value in one.at.items())
        yield f"[bold]{at}: loss {one.loss:.4f}[/], 90 % of runs in {one.low:.4f} to {one.high:.4f}"
        yield from (f"  [yellow]{escape(note)}[/]" for note in one.notes)
    for best in optima:
        yield from _optimum(best)
    notes = [*fit.notes, *(f"left out: {one}" for one in skipped)]
    yield from (f"[dim]{escape(note)}[/]" for note in notes)


def _constants(fit: Fit) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for head in ("value", "90 % from", "to"):
        table.add_column(head, justify="right")
    for name, value in fit.constants().items():
        low, high = fit.interval(name)
        table.add_row(name, f"{value:.5g}", f"{low:.4g}", f"{high:.4g}")
    return table


def _runs(fit: Fit) -> Table:
    from atoll.scaling.fit import predicted_losses

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("params", "tokens", "members", "every", "loss", "fitted", "error"):
        table.add_column(head, justify="right")
    fitted = predicted_losses(fit.law, fit.theta, fit.points)
    rows = sorted(zip(fit.points, fitted, strict=True), key=lambda row: row[0].flops)
    for point, loss in rows[-COMBINATIONS:]:
        table.add_row(
            f"{point.params:.4g}", f"{point.tokens:.4g}", f"{point.members:g}",
            f"{point.every:g}", f"{point.loss:.4f}", f"{float(loss):.4f}",
            f"{float(loss) / point.loss - 1:+.2%}",
        )  # fmt: skip
    if len(rows) > COMBINATIONS:
        table.caption = f"the largest {COMBINATIONS} of {len(rows)} runs"
        table.caption_justify = "left"
    return table


def _checks(fit: Fit) -> Iterator[str]:
    yield f"a run that was left out is predicted to {fit.score:.2%} on average"
    held_out = fit.held_out
    if held_out is None:
        yield f"[yellow]no size was held out:[/] {escape(fit.held_out_note)}"
        return
    yield (
        f"the largest {held_out.variable} ({held_out.value:.4g}, {held_out.ratio:.3g} x the next), "
        f"held out: {held_out.mean_error:.2%} off on average, {held_out.worst_error:.2%} at worst"
    )


def _optimum(best: Optimum) -> Iterator[str]:
    low, high = best.params_interval
    few, many = best.tokens_interval
    yield (
        f"[bold]{best.flops:.3g} FLOPs: params {best.params:.4g}, tokens {best.tokens:.4g}[/]"
        f" ({best.tokens_per_parameter:.3g} per parameter)"
    )
    yield f"  90 %: params {low:.3g} to {high:.3g}, tokens {few:.3g} to {many:.3g}"
    one = best.prediction
    yield f"  loss {one.loss:.4f}, 90 % of runs in {one.low:.4f} to {one.high:.4f}"
    yield from (f"  [yellow]{escape(note)}[/]" for note in (*best.notes, *one.notes))
