"""Terminal output of `atoll plan JOB.toml`, at most 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from atoll.cli.views import screen
from atoll.fleet.fleet import few
from atoll.methods.table import PRESETS

if TYPE_CHECKING:
    from atoll.forecast.answer import Answer
    from atoll.forecast.predict import Forecast

MOST_LINES = 40


def page(found: Answer, *, all_: bool) -> Iterator[RenderableType]:
    """Yield the output: job and machines, the candidates, the choice, why, and what to paste."""
    from atoll.forecast.answer import best_of_each, hours_of

    ranking, load = found.ranking, found.workload
    yield (
        f"{escape(found.spec.model.name)}, {screen.count(load.parameters)} parameters, "
        f"{screen.count(load.tokens)} {load.unit} a step and member, {load.steps:,} steps; "
        f"{len(found.fleet)} machines"
    )
    yield from (f"[yellow]{escape(note)}[/]" for note in found.fleet.notes)
    shown = ranking.forecasts if all_ else best_of_each(ranking.forecasts)
    yield _table(found, shown[:MOST_LINES])
    hidden = len(ranking.forecasts) - len(shown)
    if hidden > 0:
        yield f"[dim]the best of each method; {hidden} other candidates: --all[/]"
    best = ranking.best
    names = few(best.candidate.members)
    yield f"[green]picks[/] {escape(best.candidate.words())}; {escape(names)}"
    low, high = (best.step_low_s / best.step_s, best.step_high_s / best.step_s)
    hours = hours_of(found, best)
    yield (
        f"  {best.step_s:.3g} s a step ({best.step_low_s:.3g} to {best.step_high_s:.3g}), "
        f"{screen.duration(3600 * hours)} in all "
        f"({screen.duration(3600 * hours * low)} to {screen.duration(3600 * hours * high)})"
    )
    if best.price_per_hour:
        price = best.price_per_hour * hours
        yield f"  price: {best.price_per_hour:.3g} an hour, {price:.3g} in all"
    yield from (f"  {escape(line)}" for line in _losses(found, best))
    yield from (f"- {escape(reason)}" for reason in ranking.reasons)
    if best.fits is None:
        yield "- whether the model fits the memory is not known: say memory_gb of the machines"
    yield from (f"[dim]- {escape(ground)}[/]" for ground in best.grounds)
    if not best.candidate.alone:
        yield f"[dim]- what its tokens are worth: {escape(best.gain.ground)}[/]"
    yield from (f"[dim]left out: {escape(line)}[/]" for line in ranking.left_out)
    yield Text("\n" + best.candidate.toml(of=len(found.fleet)), no_wrap=True, overflow="ignore")


def _table(found: Answer, shown: Sequence[Forecast]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    alone = found.ranking.alone.worth_per_s[1]
    for head, side in (
        ("method", "left"), ("every", "right"), ("codec", "left"), ("route", "left"),
        ("n", "right"), ("s/step", "right"), ("wait", "right"), ("sent", "right"),
        ("gain", "right"),
    ):  # fmt: skip
        table.add_column(head, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for one in shown:
        options, candidate = one.candidate.options, one.candidate
        every = str(options.get("every", 1))
        table.add_row(
            candidate.preset, "-" if candidate.alone else every + _delay(options.get("delay")),
            "-" if candidate.alone else _short(candidate.codec or PRESETS[candidate.preset].codec),
            "-" if candidate.alone else candidate.route, str(len(candidate.members)),
            f"{one.step_s:.3g}", f"{one.waiting_s / one.step_s:.0%}",
            screen.size(one.sent_bytes) if one.sent_bytes else "-",
            f"{one.worth_per_s[1] / alone:.2f}",
            style="bold" if one is found.ranking.best else "",
        )  # fmt: skip
    return table


def _delay(delay: object) -> str:
    return f"+{delay}" if delay else ""


def _short(codec: str) -> str:
    """Return a codec without the name of its feedback: `int8*`."""
    if codec.startswith("feedback(") and codec.endswith(")"):
        return codec[len("feedback(") : -1] + "*"
    return codec


def _losses(found: Answer, best: Forecast) -> Iterator[str]:
    """Yield the predicted loss and the time to the target; or why there is none."""
    from atoll.forecast.answer import hours_until, loss_of

    if found.fit is None:
        yield "no loss is predicted: there is no scaling law of this model (--law scaling.json)"
        return
    loss = loss_of(found, best)
    yield f"loss {loss.loss:.4f} at the end ({loss.low:.4f} to {loss.high:.4f})"
    yield from loss.notes
    if found.target is None:
        return
    until = hours_until(found, best)
    if math.isinf(until["hours"]):
        yield f"loss {found.target:g} is not reached in ten years by this law"
        return
    high = "never" if math.isinf(until["high"]) else screen.duration(3600 * until["high"])
    yield (
        f"loss {found.target:g} after {screen.duration(3600 * until['hours'])} "
        f"({screen.duration(3600 * until['low'])} to {high})"
    )
    if best.price_per_hour:
        yield f"price until then: {best.price_per_hour * until['hours']:.3g}"
