"""What the ledger keeps of a run, and of a row's comparison with its reference."""

from __future__ import annotations

from typing import Any

from bench.methods.comparing import compare
from bench.methods.ledger import Record
from bench.methods.running import Trial, run


def key_of(trial: Trial) -> dict[str, Any]:
    """Return what a run's record says of its trial."""
    return {
        "kind": "run", "row": trial.row.name, "members": trial.members, "seed": trial.seed,
        "steps": trial.setting.steps, "scale": trial.setting.scale,
    }  # fmt: skip


def reference_of(trial: Trial) -> dict[str, Any]:
    """Return what the record of a row's comparison with its reference says of it."""
    return {**key_of(trial), "kind": "reference", "members": 0, "seed": 0}


def measured(trial: Trial, *, firsts: frozenset[str]) -> list[Record]:
    """Run a trial; those that are named in `firsts` are compared with their reference before."""
    found = []
    if trial.name in firsts:
        found.append({**compare(trial), **reference_of(trial)})
    return [*found, {**run(trial), **key_of(trial)}]
