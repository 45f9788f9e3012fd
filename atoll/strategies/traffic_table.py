"""The catalogue with figures: rows of plain values, for tables and for JSON.

The figures come from the strategies themselves, which loads torch; without it they are left out.

What a strategy would send in a run that nobody has to start: its own `traffic`. Loads torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atoll.codec.registry import make_codec
from atoll.config import StrategyTable
from atoll.errors import unknown
from atoll.group.collectives.costs import moved_bytes
from atoll.group.single import SingleGroup
from atoll.strategies.base import Traffic
from atoll.strategies.catalogue import ADMISSIONS, AGGREGATES, CODECS, COLLECTIVES, METHODS, Entry
from atoll.strategies.options import options_of
from atoll.strategies.registry import OUTERS, PRESETS, Resolved, build_outer, resolve
from atoll.task import Task

if TYPE_CHECKING:
    from atoll.strategies.base import Traffic


PARTS: Mapping[str, Mapping[str, Entry]] = {
    "codecs": CODECS,
    "aggregates": AGGREGATES,
    "collectives": COLLECTIVES,
    "admission": ADMISSIONS,
}
"""The catalogue's tables besides the methods."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A run that traffic is asked for."""

    parameters: int
    peers: int
    steps: int


def rows(scale: Scale) -> list[Row]:
    """Return every method with what a member sends per step."""
    return [
        _row(METHODS[name], _resolved(name, scale), scale) for name in METHODS if name in PRESETS
    ]


def one_row(name: str, scale: Scale) -> Row:
    """Return one method in full: a preset, or an outer strategy with its defaults.

    Raises:
        ConfigError: there is no such name; the nearest one is named.
    """
    if name in PRESETS:
        resolved, entry = _resolved(name, scale), METHODS[name]
    elif name in OUTERS:
        resolved = Resolved(inner="local", outer=name, codec="fp32", options={})
        entry = METHODS[next(key for key, preset in PRESETS.items() if preset.outer == name)]
    else:
        raise unknown("method", name, {*PRESETS, *OUTERS, *PARTS})
    row = _row(entry, resolved, scale)
    row["options"] = [
        {
            "name": option.name,
            "kind": option.kind,
            "default": option.default,
            "value": resolved.options.get(option.name, option.default),
            "line": option.line,
        }
        for option in options_of(resolved.outer)
    ]
    return row | {"name": name, "toml": toml(name, row["options"]) + _train(entry, name)}


def part_rows(kind: str, scale: Scale) -> list[Row]:
    """Return a table of the catalogue besides the methods, by its name.

    Codecs come with what they make of a number, in bits, of a model of that size (without torch:
    None); collectives with what the busiest member sends to add up such a model once.
    """
    found = [_words(entry) for entry in PARTS[kind].values()]
    for row in found:
        if kind == "collectives":
            row["busiest_sent"] = max(
                moved_bytes(row["name"], rank=rank, members=scale.peers, elements=scale.parameters)[
                    0
                ]
                for rank in range(scale.peers)
            )
        elif kind == "codecs":
            row |= _codec_figures(row["name"], scale)
    return found


def _codec_figures(name: str, scale: Scale) -> Row:
    if importlib.util.find_spec("torch") is None:
        return {"example": None, "bits_per_value": None}
    from atoll.codec.registry import CODECS as BUILT
    from atoll.codec.registry import WRAPPERS

    example = BUILT[name].example if name in BUILT else WRAPPERS[name].example
    bits = bits_per_value(example, elements=scale.parameters)
    return {"example": example, "bits_per_value": round(bits, 3)}


def toml(name: str, options: list[Row]) -> str:
    """Return the `[strategy]` table of a job file that chooses a method."""
    lines = ["[strategy]", f'preset = "{name}"' if name in PRESETS else f'outer = "{name}"']
    for option in options:
        value = option["value"]
        if isinstance(value, bool):
            lines.append(f"{option['name']} = {str(value).lower()}")
        elif isinstance(value, int | float):
            lines.append(f"{option['name']} = {value}")
        elif isinstance(value, str):
            lines.append(f'{option["name"]} = "{value}"')
    return "\n".join(lines) + "\n"


def _train(entry: Entry, name: str) -> str:
    """Return the inner optimizer that a preset wants, as a table of a job file."""
    optimizer = entry.optimizer if name in PRESETS else ""
    return f'\n[train]\noptimizer = "{optimizer}"\n' if optimizer else ""


def _resolved(name: str, scale: Scale) -> Resolved:
    return resolve(StrategyTable(preset=name), steps=scale.steps)


def _words(entry: Entry) -> Row:
    return {
        "name": entry.name,
        "line": entry.line,
        "good_for": entry.good_for,
        "papers": [
            {"title": paper.title, "year": paper.year, "url": paper.url} for paper in entry.papers
        ],
        "page": entry.page,
    }


def _row(entry: Entry, resolved: Resolved, scale: Scale) -> Row:
    found = _weighed(resolved, scale)
    return _words(entry) | {
        "outer": resolved.outer,
        "codec": resolved.codec,
        "rounds": found.rounds if found else None,
        "per_step": per_step(found, scale) if found else None,
    }


def _weighed(resolved: Resolved, scale: Scale) -> Traffic | None:
    if importlib.util.find_spec("torch") is None:
        return None

    return measure_traffic(
        resolved, elements=scale.parameters, peers=scale.peers, steps=scale.steps
    )


def per_step(found: Traffic, scale: Scale) -> dict[str, float]:
    """Return bytes per step of one member: sent and received, through the relay and directly."""
    return {
        "relay_sent": found.relay_sent_bytes / scale.steps,
        "relay_received": found.relay_received_bytes / scale.steps,
        "direct_sent": found.direct_sent_bytes / scale.steps,
        "direct_received": found.direct_received_bytes / scale.steps,
    }


WIDTH_PER_LAYER = 64
"""A transformer of 12 layers is about 768 wide."""


class Shapes(nn.Module):
    """Parameters in the shapes of a transformer, exactly as many as asked for."""

    def __init__(self, elements: int) -> None:
        """Fill most of the number with blocks, the rest with the embedding."""
        super().__init__()
        width = max(1, int((WIDTH_PER_LAYER * elements / 14) ** (1 / 3)))
        width = width // 16 * 16 or width
        layers = max(1, width // WIDTH_PER_LAYER)
        while layers and 12 * layers * width**2 > elements:
            layers -= 1
        sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        rows, rest = divmod(elements - 12 * layers * width**2, width)
        self.beside = _tensors([(rows, width), (rest,)])
        self.blocks = nn.ModuleList(_tensors(sizes) for _ in range(layers))


def _tensors(sizes: Sequence[tuple[int, ...]]) -> nn.ParameterList:
    """Return parameters of these shapes; empty ones are left out."""
    return nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes if 0 not in size)


def measure_traffic(resolved: Resolved, *, elements: int, peers: int, steps: int) -> Traffic:
    """Return what the first of some members would send and receive in a run of `steps`.

    The model has the shapes of a transformer of that size, for methods that look at matrices, but
    no memory is taken: on torch's device `meta` tensors are shapes and nothing else.

    Raises:
        ConfigError: an option or the codec is unknown or out of range.
    """
    outer, codec = build_outer(resolved), make_codec(resolved.codec)
    with torch.device("meta"):
        model = Shapes(elements)
        task = Task(model, torch.optim.AdamW(model.parameters()), member="w0", last=steps)
        outer.setup(task, group=SingleGroup(), codec=codec)
    return outer.traffic(elements, peers, steps=steps)


def bits_per_value(spec: str, *, elements: int) -> float:
    """Return what a codec makes of each number of a model with so many, in the mean."""
    codec = make_codec(spec)
    with torch.device("meta"):
        codec.set_shapes([parameter.shape for parameter in Shapes(elements).parameters()])
    return 8 * codec.nbytes(elements) / elements
