"""The tables of methods and presets. A new method is a class, listed in `METHODS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from atoll.methods.decentralized import Gossip, NoLoCo, Pairwise
from atoll.methods.every_step import (
    Cocktail,
    DeMo,
    EveryStep,
    OneBitAdam,
    PowerSGD,
    SignMajority,
    Sparta,
)
from atoll.methods.local_moments import MTDAO, DesLoc
from atoll.methods.method import Method, Preset
from atoll.methods.overlapped import Decoupled, Eager, Streaming
from atoll.methods.parameter_server import Asynchronous, Hierarchical, Server
from atoll.methods.periodic import Average, DiLoCo, NoSync, SlowMo

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        method.name: method
        for method in (
            NoSync,
            EveryStep,
            Average,
            DiLoCo,
            Streaming,
            Decoupled,
            Eager,
            SlowMo,
            DesLoc,
            MTDAO,
            Gossip,
            Pairwise,
            NoLoCo,
            Asynchronous,
            Hierarchical,
            Server,
            Sparta,
            DeMo,
            Cocktail,
            SignMajority,
            OneBitAdam,
            PowerSGD,
        )
    }
)
"""Name -> outer strategy, in the order of `atoll methods`."""


def presets_of(method: type[Method]) -> Iterator[Preset]:
    """Yield the presets of a method with `outer` and `page` set."""
    for preset in method.presets:
        page = f"docs/methods/{method.pages}/{preset.name}.md"
        yield dataclasses.replace(preset, outer=method.name, page=page)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {preset.name: preset for method in METHODS.values() for preset in presets_of(method)}
)


def method_named(outer: str, preset: str) -> type[Method] | None:
    """Return the method of a `[strategy]`; None if a name is unknown."""
    known = PRESETS.get(preset)
    return METHODS.get(outer or (known.outer if known else ""))
