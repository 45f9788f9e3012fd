"""`atoll methods`: every training method, its traffic and its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.strategies.traffic_table import Row

PARTS = ("codecs", "aggregates", "collectives", "admission")
"""Arguments instead of a method's name: the other tables of the catalogue."""


def methods(
    name: Annotated[
        str, typer.Argument(help=f"Details of a method; or {', '.join(PARTS)}.", show_default=False)
    ] = "",
    parameters: Annotated[
        str, typer.Option(help="Number of parameters for the traffic figures, e.g. 124M or 1.5B.")
    ] = "124M",
    peers: Annotated[int, typer.Option(help="Number of members.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the run.", min=1)] = 1000,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the methods: what each does, what it sends, and when to use it."""
    import json

    from atoll.cli.views import screen
    from atoll.cli.views.methods import full, listing, parts
    from atoll.strategies.traffic_table import Scale, one_row, part_rows, rows

    scale = Scale(parameters=parse_count(parameters), peers=peers, steps=steps)
    console = screen.output()
    found: list[Row] | Row
    if name in PARTS:
        found = part_rows(name, scale)
        page = parts(found, scale, width=console.width)
    elif name:
        found = one_row(name, scale)
        page = full(found, scale)
    else:
        found = rows(scale)
        page = listing(found, scale, width=console.width)
    if json_:
        typer.echo(json.dumps(found, indent=1))
    else:
        console.print(page)


def parse_count(text: str) -> int:
    """Return a number of parameters written like `124M`, `1.5B` or `115008`.

    Raises:
        ConfigError: it is not such a number, or not above 0.
    """
    from atoll.errors import ConfigError

    units = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    plain = text.strip().lower().replace("_", "").replace(",", "")
    unit = units.get(plain[-1:], 1.0)
    try:
        value = float(plain[:-1] if plain[-1:] in units else plain) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e15:
        raise ConfigError(
            "this number of parameters cannot be read", given=repr(text), expected="e.g. 124M"
        )
    return round(value)
