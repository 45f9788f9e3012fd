"""Tables of methods and codecs with traffic figures: rows of plain values, for pages and JSON.

The strategies compute the figures, which needs torch; without it they are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from atoll.config import StrategyTable
from atoll.config.swarm_tables import USUAL_STAGES, SwarmTable
from atoll.errors import unknown
from atoll.group.collectives.costs import moved_bytes
from atoll.methods.codecs import CODECS, CodecRow
from atoll.methods.method import Preset
from atoll.methods.parts import ADMISSIONS, AGGREGATES, COLLECTIVES, Entry
from atoll.methods.table import METHODS, PRESETS
from atoll.strategies.resolve import Resolved, resolve

if TYPE_CHECKING:
    from atoll.strategies.base import Traffic


PARTS: Mapping[str, Mapping[str, CodecRow] | Mapping[str, Entry]] = {
    "codecs": CODECS,
    "aggregates": AGGREGATES,
    "collectives": COLLECTIVES,
    "admission": ADMISSIONS,
}
"""The catalogue's tables other than the methods."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The run for which traffic is computed."""

    parameters: int
    peers: int
    steps: int


def rows(scale: Scale) -> list[Row]:
    """Return every method with a member's traffic per step."""
    return [_row(preset, _resolved(name, scale), scale) for name, preset in PRESETS.items()]


def one_row(name: str, scale: Scale) -> Row:
    """Return one method in full: a preset, or an outer strategy with its defaults.

    Raises:
        ConfigError: there is no such name; the nearest one is named.
    """
    if name in PRESETS:
        resolved, entry = _resolved(name, scale), PRESETS[name]
    elif name in METHODS:
        resolved = Resolved(method=METHODS[name]())
        entry = next(preset for preset in PRESETS.values() if preset.outer == name)
    else:
        raise unknown("method", name, {*PRESETS, *METHODS, *PARTS})
    row = _row(entry, resolved, scale)
    row["options"] = [
        {
            "name": option.name,
            "kind": option.kind,
            "default": option.default,
            "value": getattr(resolved.method, option.name),
            "line": option.line,
        }
        for option in resolved.method.options()
    ]
    return row | {"name": name, "toml": toml(name, row["options"]) + _train(entry, name)}


def part_rows(kind: str, scale: Scale) -> list[Row]:
    """Return a table of the catalogue by its name.

    Codecs have their bits per value for a model of that size (None without torch); collectives have
    what the busiest member sends to sum such a model once.
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
    from atoll.strategies.measured_traffic import bits_per_value

    example = CODECS[name].example
    bits = bits_per_value(example, elements=scale.parameters)
    return {"example": example, "bits_per_value": round(bits, 3)}


def toml(name: str, options: list[Row]) -> str:
    """Return the `[strategy]` table of a job file that selects a method."""
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


def _train(entry: Preset, name: str) -> str:
    """Return a preset's inner optimizer, as a table of a job file."""
    optimizer = entry.optimizer if name in PRESETS else ""
    return f'\n[train]\noptimizer = "{optimizer}"\n' if optimizer else ""


def _resolved(name: str, scale: Scale) -> Resolved:
    return resolve(StrategyTable(preset=name), steps=scale.steps)


def _words(entry: Entry | CodecRow | Preset) -> Row:
    return {
        "name": entry.name,
        "line": entry.line,
        "good_for": entry.good_for,
        "loss": entry.loss if isinstance(entry, Preset) else "",
        "papers": [
            {"title": paper.title, "year": paper.year, "url": paper.url} for paper in entry.papers
        ],
        "page": entry.page,
    }


def _row(entry: Preset, resolved: Resolved, scale: Scale) -> Row:
    stages = USUAL_STAGES if entry.inner == "swarm" else 0
    if stages:  # members exchange the values of their own stage only
        peers = max(1, scale.peers // stages)
        scale = replace(scale, parameters=scale.parameters // stages, peers=peers)
    found = _weighed(resolved, scale)
    return _words(entry) | {
        "outer": resolved.outer,
        "codec": resolved.codec,
        "stages": stages or None,
        "rounds": found.rounds if found else None,
        "per_step": per_step(found, scale) if found else None,
        "activation_bits": _activation_bits(scale) if found and stages else None,
    }


def _activation_bits(scale: Scale) -> float:
    """Return the bits of a number that goes from one stage to the next, by default."""
    from atoll.strategies.measured_traffic import bits_per_value

    return round(bits_per_value(SwarmTable.codec, elements=scale.parameters), 3)


def _weighed(resolved: Resolved, scale: Scale) -> Traffic | None:
    if importlib.util.find_spec("torch") is None:
        return None
    from atoll.strategies.measured_traffic import measure_traffic

    return measure_traffic(
        resolved, elements=scale.parameters, peers=scale.peers, steps=scale.steps
    )


def per_step(found: Traffic, scale: Scale) -> dict[str, float]:
    """Return a member's bytes per step: sent and received, over the relay and directly."""
    return {
        "relay_sent": found.relay_sent_bytes / scale.steps,
        "relay_received": found.relay_received_bytes / scale.steps,
        "direct_sent": found.direct_sent_bytes / scale.steps,
        "direct_received": found.direct_received_bytes / scale.steps,
    }
