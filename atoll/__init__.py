"""Atoll turns the computers people already have into one training cluster.

In a script of your own:

    with atoll.join() as run:
        optimizer = run.wrap(model, optimizer, outer=atoll.DiLoCo(every=500), codec="int8")
        for batch in run.shard(loader):
            ...

Importing this package loads neither torch nor anything else of weight; the names below are looked
up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "NoSync": "atoll.strategies.outer.single",
    "Asynchronous": "atoll.strategies.parameter_server.asynchronous",
    "AtollError": "atoll.errors",
    "Average": "atoll.strategies.outer.average",
    "Cocktail": "atoll.strategies.outer.cocktail",
    "DeMo": "atoll.strategies.outer.demo",
    "DiLoCo": "atoll.strategies.outer.diloco",
    "Eager": "atoll.strategies.outer.eager",
    "EveryStep": "atoll.strategies.outer.every_step",
    "Gossip": "atoll.strategies.outer.gossip",
    "MemoryGroups": "atoll.group.in_process.groups",
    "NoLoCo": "atoll.strategies.outer.noloco",
    "OneBitAdam": "atoll.strategies.outer.onebit_adam",
    "Pairwise": "atoll.strategies.outer.pairwise",
    "PowerSGD": "atoll.strategies.outer.powersgd",
    "Run": "atoll.run",
    "Server": "atoll.strategies.parameter_server.server",
    "SignMajority": "atoll.strategies.outer.sign_majority",
    "SlowMo": "atoll.strategies.outer.slowmo",
    "Sparta": "atoll.strategies.outer.sparta",
    "Streaming": "atoll.strategies.outer.streaming",
    "join": "atoll.run",
}
"""Public name -> module that defines it."""

if TYPE_CHECKING:
    from atoll.errors import AtollError
    from atoll.group.in_process.groups import MemoryGroups
    from atoll.run import Run, join
    from atoll.strategies.outer.average import Average
    from atoll.strategies.outer.cocktail import Cocktail
    from atoll.strategies.outer.demo import DeMo
    from atoll.strategies.outer.diloco import DiLoCo
    from atoll.strategies.outer.eager import Eager
    from atoll.strategies.outer.every_step import EveryStep
    from atoll.strategies.outer.gossip import Gossip
    from atoll.strategies.outer.noloco import NoLoCo
    from atoll.strategies.outer.onebit_adam import OneBitAdam
    from atoll.strategies.outer.pairwise import Pairwise
    from atoll.strategies.outer.powersgd import PowerSGD
    from atoll.strategies.outer.sign_majority import SignMajority
    from atoll.strategies.outer.single import NoSync
    from atoll.strategies.outer.slowmo import SlowMo
    from atoll.strategies.outer.sparta import Sparta
    from atoll.strategies.outer.streaming import Streaming
    from atoll.strategies.parameter_server.asynchronous import Asynchronous
    from atoll.strategies.parameter_server.server import Server

__all__ = [
    "Asynchronous",
    "AtollError",
    "Average",
    "Cocktail",
    "DeMo",
    "DiLoCo",
    "Eager",
    "EveryStep",
    "Gossip",
    "MemoryGroups",
    "NoLoCo",
    "NoSync",
    "OneBitAdam",
    "Pairwise",
    "PowerSGD",
    "Run",
    "Server",
    "SignMajority",
    "SlowMo",
    "Sparta",
    "Streaming",
    "__version__",
    "join",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted([*globals(), *__all__])
