"""The kinds of data that can be shared out: each yields one slot's items from any position.

Positions count the slot's samples (or items) over all ranks of the member, so they hold for any
number of ranks and any batch size.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Sampler, get_worker_info

from atoll.data.order import hashes, permutation
from atoll.errors import DataError
from atoll.train.shares.seeded_draws import CHUNK, check_repeatable, seeded_draws

_SHUFFLE_KEY = 0x73687566


@dataclass(frozen=True, slots=True)
class Division:
    """How data is divided: by the members' slots, then by the ranks of each member."""

    slot: int
    num_slots: int
    seed: int
    rank: int = 0
    ranks: int = 1
    """Ranks with rows of their own; they get equally many, a remainder below `ranks` is dropped."""

    def share_of(self, count: int, slot: int | None = None) -> int:
        """Return how many of `count` items in turn are a rank's; by default in the own slot."""
        first = self.slot if slot is None else slot
        return len(range(first, count, self.num_slots)) // self.ranks


class Source(ABC):
    """Data that is shared out."""

    division: Division
    stride: int
    """Samples of the slot that one item takes, over all ranks."""
    movable = True
    """Whether any slot can be read from any position."""

    @abstractmethod
    def open(self, slot: int, *, pass_: int, skip: int) -> Iterator[Any]:
        """Yield this rank's items of a slot's pass, after `skip` samples of the slot."""

    @abstractmethod
    def length(self) -> int | None:
        """Return how many items this rank has in a pass of its own slot; None: unknown."""

    @property
    def digest(self) -> int | None:
        """Digest of the order of the pass under way; None: it is equal on all members anyway."""
        return None

    def size(self, slot: int) -> int | None:
        """Return how many samples all ranks together have in a pass of a slot; None: unknown."""
        return None


# ------------------------------------------------------------------------------ iterables


class ItemSource(Source):
    """Any iterable, whose items are dealt out in turn; every member MUST see the same order."""

    def __init__(self, data: Iterable[Any], division: Division) -> None:
        self._data, self.division, self.stride = data, division, division.ranks
        self.movable = not hasattr(data, "__next__")

    def open(self, slot: int, *, pass_: int, skip: int) -> Iterator[Any]:
        """Yield items; in a worker of a loader only this worker's part of them."""
        division, worker = self.division, get_worker_info()
        items = dealt(self._data, division, slot=slot, skip=skip)
        if worker is None:
            return items
        return _of_worker(items, worker.id, worker.num_workers)

    def length(self) -> int | None:
        """Return the number of items, if the data has a length."""
        count = length_of(self._data)
        return self.division.share_of(count) if count is not None else None

    def size(self, slot: int) -> int | None:
        """Return the number of items, if the data has a length."""
        count = length_of(self._data)
        return None if count is None else self.division.share_of(count, slot) * self.stride

    @property
    def data(self) -> Any:
        """What is dealt out."""
        return self._data


def dealt(items: Iterable[Any], division: Division, *, slot: int, skip: int) -> Iterator[Any]:
    """Yield a rank's items of a slot: every n-th, in turn for the ranks."""
    own, number = None, 0
    for index, item in enumerate(items):
        if index % division.num_slots != slot:
            continue
        rank, number = number % division.ranks, number + 1
        if rank == division.rank:
            own = item
        # All ranks have one when the last one has: they stay equally long.
        if rank == division.ranks - 1 and number > skip // division.ranks * division.ranks:
            yield own


def _of_worker(items: Iterator[Any], worker: int, workers: int) -> Iterator[Any]:
    """Yield every n-th item, in one of the n processes that load for one loader.

    The data itself does not see that it is read in a worker: it might leave out the items of the
    other workers, which are dealt out here.
    """
    number = 0
    while True:
        with _no_worker():
            try:
                item = next(items)
            except StopIteration:
                return
        if number % workers == worker:
            yield item
        number += 1


@contextmanager
def _no_worker() -> Iterator[None]:
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


# ------------------------------------------------------------------------------- data sets


class MapSource(Source):
    """A data set with a length, in ascending order of the share."""

    def __init__(self, data: Any, division: Division) -> None:
        self._data, self.division, self.stride = data, division, division.ranks
        self._count = len(data)
        self._order = PlainOrder(self._count, division, shuffled=False)
        self.indices = list(self._order)

    def open(self, slot: int, *, pass_: int, skip: int) -> Iterator[Any]:
        """Yield samples."""
        self._order.begin(slot, pass_=pass_, skip=skip)
        return (self._data[index] for index in self._order)

    def length(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    def size(self, slot: int) -> int:
        """Return the number of samples of all ranks."""
        return self.division.share_of(self._count, slot) * self.division.ranks


# --------------------------------------------------------------------------------- loaders


class SlotOrder(Sampler[Any], ABC):
    """What a loader loads: the order of one slot's pass, from a position."""

    digest: int | None = None
    """Of the first draws of the pass."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self.begin(division.slot, pass_=0, skip=0)

    def begin(self, slot: int, *, pass_: int, skip: int) -> None:
        """Set what the next iteration yields."""
        self._slot, self._pass, self._skip = slot, pass_, skip

    @property
    @abstractmethod
    def count(self) -> int:
        """The length of the order of all slots."""

    def __len__(self) -> int:
        """Return the length for the own slot and rank."""
        return self._division.share_of(self.count)


class PlainOrder(SlotOrder):
    """The samples of a slot, a random share of all, in ascending or in random order."""

    def __init__(self, count: int, division: Division, *, shuffled: bool) -> None:
        super().__init__(division)
        self._count, self._shuffled = count, shuffled
        self._samples = {division.slot: own_indices(count, division, slot=division.slot)}

    def __iter__(self) -> Iterator[int]:
        division, slot = self._division, self._slot
        if slot not in self._samples:
            self._samples[slot] = own_indices(self._count, division, slot=slot)
        samples = self._samples[slot]
        if self._shuffled:
            key = (division.seed, _SHUFFLE_KEY, slot, self._pass)
            samples = [samples[at] for at in permutation(len(samples), key=key).tolist()]
        own = samples[division.rank :: division.ranks][: len(samples) // division.ranks]
        return iter(own[self._skip // division.ranks :])

    @property
    def count(self) -> int:
        """The number of samples."""
        return self._count


class DrawnOrder(SlotOrder):
    """What a sampler of the script draws, dealt out in turn; the same draws on every member."""

    def __init__(self, sampler: Any, division: Division) -> None:
        super().__init__(division)
        check_repeatable(sampler, seed=division.seed)
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        draws = seeded_draws(self._sampler, seed=self._division.seed, pass_=self._pass)
        first = list(itertools.islice(draws, CHUNK))
        self.digest = zlib.crc32(repr(first).encode())
        draws = itertools.chain(first, draws)
        return dealt(draws, self._division, slot=self._slot, skip=self._skip)

    @property
    def count(self) -> int:
        """The number of draws."""
        return len(self._sampler)


class LoaderSource(Source):
    """A loader of a data set with a length: its samples are dealt out before they are loaded."""

    def __init__(self, loader: DataLoader[Any], order: SlotOrder, division: Division) -> None:
        self.division, self._order = division, order
        self._generator = torch.Generator()
        self._loader = _like(loader, order, generator=self._generator)
        self.stride = (self._loader.batch_size or 1) * division.ranks

    def open(self, slot: int, *, pass_: int, skip: int) -> Iterator[Any]:
        """Yield batches."""
        key = (self.division.seed, slot, pass_, self.division.rank)
        self._generator.manual_seed(int(hashes(1, key=key)[0] >> 1))  # also of the workers' seeds
        self._order.begin(slot, pass_=pass_, skip=skip)
        return iter(self._loader)

    def length(self) -> int | None:
        """Return the number of batches."""
        return length_of(self._loader)

    @property
    def digest(self) -> int | None:
        """Digest of what the script's sampler draws in this pass."""
        return self._order.digest

    def size(self, slot: int) -> int | None:
        """Return the number of samples, or of batches that the script draws itself."""
        if self.length() is None:
            return None
        return self.division.share_of(self._order.count, slot) * self.division.ranks


def _like(loader: DataLoader[Any], order: SlotOrder, *, generator: torch.Generator) -> Any:
    """Return a loader with the same options that loads what `order` yields."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.batch_size is not None:
        options |= {"sampler": order, "batch_size": loader.batch_size}
        options |= {"drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        options |= {"batch_sampler": order}
    else:
        options |= {"sampler": order, "batch_size": None}
    return DataLoader(loader.dataset, generator=generator, **options)


# ----------------------------------------------------------------------------------- parts


def length_of(data: Any) -> int | None:
    """Return the number of items, or None; loaders of streams raise when asked."""
    try:
        return len(data)
    except TypeError:
        return None


def own_indices(count: int, division: Division, *, slot: int) -> list[int]:
    """Return the indices of a slot's samples: a random share, in ascending order.

    Raises:
        DataError: there are fewer samples than members, or ranks.
    """
    if count < division.num_slots * division.ranks:
        raise DataError(
            "too little data to split among the members",
            given=f"{count} samples for {division.num_slots * division.ranks} members",
            expected="at least one sample per member",
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(division.seed))
    mine: list[int] = order[slot :: division.num_slots].sort().values.tolist()
    return mine
