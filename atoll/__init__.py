"""Atoll turns the computers people already have into one training cluster.

In a script of your own:

    with atoll.join() as run:
        optimizer = run.wrap(model, optimizer, outer=atoll.DiLoCo(every=500), codec="int8")
        for batch in run.shard(loader):
            ...

Importing this package does not load torch: the names below are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "NoSync": "atoll.methods.periodic",
    "Asynchronous": "atoll.methods.parameter_server",
    "AtollError": "atoll.errors",
    "Average": "atoll.methods.periodic",
    "Cocktail": "atoll.methods.every_step",
    "DeMo": "atoll.methods.every_step",
    "DiLoCo": "atoll.methods.periodic",
    "Eager": "atoll.methods.overlapped",
    "EveryStep": "atoll.methods.every_step",
    "Gossip": "atoll.methods.decentralized",
    "MemoryGroups": "atoll.group.in_process.groups",
    "NoLoCo": "atoll.methods.decentralized",
    "OneBitAdam": "atoll.methods.every_step",
    "Pairwise": "atoll.methods.decentralized",
    "PowerSGD": "atoll.methods.every_step",
    "Run": "atoll.run",
    "Server": "atoll.methods.parameter_server",
    "SignMajority": "atoll.methods.every_step",
    "SlowMo": "atoll.methods.periodic",
    "Sparta": "atoll.methods.every_step",
    "Streaming": "atoll.methods.overlapped",
    "connect": "atoll.client",
    "join": "atoll.run",
}
"""Public name -> module that defines it."""

if TYPE_CHECKING:
    from atoll.client import connect
    from atoll.errors import AtollError
    from atoll.group.in_process.groups import MemoryGroups
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
    from atoll.methods.overlapped import Eager, Streaming
    from atoll.methods.parameter_server import Asynchronous, Server
    from atoll.methods.periodic import Average, DiLoCo, NoSync, SlowMo
    from atoll.run import Run, join

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
    "connect",
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
