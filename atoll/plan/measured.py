"""What a model costs on real machines, measured once and kept in a file. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.errors import DataError
from atoll.strategies.inner.pipeline.simulation import Link


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of an island, as it was measured."""

    name: str
    ranks: int
    """Most ranks that it may run."""
    cores: int = 0
    """Ranks that compute at full speed at one time; 0: each has an accelerator of its own."""
    speed: float = 1.0
    """Relative to the first machine, on which the units were measured."""
    memory_bytes: int = 0
    """Of one rank's device; 0: unknown, everything fits."""


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Seconds of each unit for a microbatch of one size."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The units of a model, the machines, and the links between them."""

    machines: tuple[Machine, ...]
    sizes: Mapping[int, UnitTimes]
    """By rows of a microbatch."""
    sent_bytes: tuple[int, ...]
    """Outputs of each unit for one row."""
    trained_bytes: tuple[int, ...]
    """Gradients of each unit."""
    near: Link
    """Between ranks of one machine."""
    far: Link
    """Between machines."""
    reduce: Mapping[int, Link] = field(default_factory=dict)
    """All-reduce by the number of ranks that take part, all groups at one time."""

    def reduce_s(self, nbytes: float, *, ranks: int) -> float:
        """Return the time to add up a gradient over replicas; 0 for one of them.

        Numbers of ranks that were not measured take as long as the next larger or largest one.
        """
        if ranks == 1 or not self.reduce:
            return 0.0
        larger = [number for number in self.reduce if number >= ranks]
        return self.reduce[min(larger) if larger else max(self.reduce)].seconds(nbytes)


def write_measured(measured: Measured, path: Path) -> None:
    """Store it; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_bytes(msgspec.json.encode(measured))
    whole.replace(path)


def read_measured(path: Path) -> Measured | None:
    """Return what was stored; None: nothing yet.

    Raises:
        DataError: the file is damaged.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            "the measurements of a pipeline cannot be read", given=f"{path} ({error})",
            remedy="delete this file: the model is then measured again",
        ) from error  # fmt: skip
    times = [t for one in found.sizes.values() for t in (*one.forward_s, *one.backward_s)]
    if not all(math.isfinite(t) and t >= 0 for t in times):
        raise DataError(
            "the measurements of a pipeline are no times", given=str(path),
            remedy="delete this file: the model is then measured again",
        )  # fmt: skip
    return found
