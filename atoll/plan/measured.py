"""What a model costs on real machines, measured once and kept in a file. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.errors import DataError
from atoll.strategies.inner.pipeline.hosts import Link


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
    rates: tuple[float, ...] = ()
    """Speed of a rank on its stage relative to its units by themselves, while 1, 2, ... ranks
    compute at one time; empty: by `cores`."""


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
    reduce: Mapping[int, Mapping[int, Link]] = field(default_factory=dict)
    """All-reduce of a stage's gradient by stages and replicas, all stages at one time."""

    def reduce_s(self, nbytes: float, *, stages: int, replicas: int) -> float:
        """Return the time to add up a gradient over replicas; 0 for one of them.

        Numbers that were not measured take as long as the next larger or largest one.
        """
        known = {p: links for p, links in self.reduce.items() if links}
        if replicas == 1 or not known:
            return 0.0
        links = known[_next(known, stages)]
        return links[_next(links, replicas)].seconds(nbytes)


def _next(numbers: Collection[int], wanted: int) -> int:
    """Return the wanted number, or else the next larger one, or the largest."""
    return min((n for n in numbers if n >= wanted), default=max(numbers))


def deal(able: Sequence[int], ranks: int) -> list[int]:
    """Return how many ranks each machine gets: as even as possible, at most those in `able`."""
    counts = [0] * len(able)
    while sum(counts) < ranks:
        free = [n for n, most in enumerate(able) if counts[n] < most]
        counts[min(free, key=lambda n: (counts[n], n))] += 1
    return counts


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
    rates = [rate for machine in found.machines for rate in machine.rates]
    if not all(math.isfinite(t) and t >= 0 for t in times) or not all(r > 0 for r in rates):
        raise DataError(
            "the measurements of a pipeline are no times", given=str(path),
            remedy="delete this file: the model is then measured again",
        )  # fmt: skip
    return found
