"""Divide a script's data among the members of a job, by slot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from atoll.errors import DataError


class ShardOrder(Sampler[int]):
    """The sample order of a loader; its first samples can be skipped once, without loading them."""

    def __init__(self, samples: Subset[Any], *, generator: torch.Generator | None) -> None:
        self._inner: Any = SequentialSampler(samples)
        if generator is not None:
            self._inner = RandomSampler(samples, generator=generator)
        self.generator, self.skip = generator, 0

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        return itertools.islice(iter(self._inner), skip, None)

    def __len__(self) -> int:
        return len(self._inner)


class DataShare:
    """One slot's share of an iterable; it ends early when the job stops, and can be resumed."""

    def __init__(
        self,
        data: Any,
        *,
        slot: int,
        num_slots: int,
        should_stop: Callable[[], bool],
        length: int | None,
        last: int | None = None,
        owner: str = "",
    ) -> None:
        """Yield the items `slot`, `slot + num_slots`, ... of `data`.

        With `last`, the highest slot, a pass ends at the last item for which that slot has one too,
        so that all shares are equally long. `owner` identifies this share: a position saved by
        another rank or member is ignored.
        """
        self.data, self._slot, self._num_slots = data, slot, num_slots
        self._should_stop, self._length = should_stop, length
        self._last = slot if last is None else last
        self._owner = owner
        sampler = getattr(data, "sampler", None)
        self._order = sampler if isinstance(sampler, ShardOrder) else None
        self._given = 0
        """Items of the pass that is under way."""
        self._began: Tensor | None = None
        """The generator of the order as it was when that pass began."""
        self._next: Mapping[str, Any] | None = None
        self._under_way = False

    def place(self) -> dict[str, Any]:
        """Return the position, for `go_to` of a share with the same owner and slots."""
        return {"owner": self._owner, "given": self._given, "order": self._began}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Start the next pass at a saved position; a position of another division is ignored."""
        if place["owner"] == self._owner and not self._under_way:
            self._next = place
            self._given, self._began = int(place["given"]), place["order"]

    def __iter__(self) -> Iterator[Any]:
        left_out = self._begin()
        own: Any = None
        for index, item in enumerate(self.data):
            if self._should_stop():
                return
            if index % self._num_slots == self._slot:
                own = item
            if index % self._num_slots != self._last:
                continue
            if left_out:
                left_out -= 1
                continue
            self._given += 1
            yield own
        self._given, self._began, self._under_way = 0, self._generator_state(), False

    def _begin(self) -> int:
        """Begin a pass; return how many items to load and skip."""
        place, self._next, self._under_way = self._next, None, True
        self._given = int(place["given"]) if place is not None else 0
        if self._order is None:
            return self._given
        if place is not None and place["order"] is not None and self._order.generator is not None:
            self._order.generator.set_state(place["order"])
        self._began = self._generator_state()
        self._order.skip = self._given * (self.data.batch_size or 1)
        return 0  # the sampler skips them, so they are not loaded

    def _generator_state(self) -> Tensor | None:
        generator = self._order.generator if self._order is not None else None
        return generator.get_state() if generator is not None else None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this data has no length")
        return self._length


def deal(
    data: Any,
    *,
    slot: int,
    num_slots: int,
    seed: int,
    should_stop: Callable[[], bool],
    rank: int = 0,
    ranks: int = 1,
) -> Any:
    """Return a slot's share of some data; see :meth:`atoll.run.Run.shard`.

    Args:
        data: A loader, a dataset or an iterable.
        slot: The slot of the share.
        num_slots: Number of slots.
        seed: Seed of the division.
        should_stop: Polled before every item of a loader or an iterable.
        rank: Which part of the share, if several ranks train on one slot.
        ranks: Number of these parts; they are equally long, a remainder is dropped.

    Raises:
        DataError: there are fewer samples than slots.
    """
    own, last, count_all = slot * ranks + rank, slot * ranks + ranks - 1, num_slots * ranks
    owner = f"{own} of {count_all}, seed {seed}"
    if isinstance(data, DataLoader):
        loader = _own_loader(data, own=own, last=last, count_all=count_all, seed=seed)
        if loader is not None:
            return DataShare(
                loader,
                slot=0,
                num_slots=1,
                should_stop=should_stop,
                length=len(loader),
                owner=owner,
            )
    count = length_of(data)
    if hasattr(data, "__getitem__") and count is not None:
        mine = own_indices(count, slot=own, num_slots=count_all, seed=seed, last=last)
        return Subset(data, mine)
    length = (count - last - 1) // count_all + 1 if count is not None else None
    return DataShare(
        data,
        slot=own,
        num_slots=count_all,
        should_stop=should_stop,
        length=length,
        last=last,
        owner=owner,
    )


def length_of(data: Any) -> int | None:
    """Return the number of items, or None; loaders of streams raise when asked."""
    try:
        return len(data)
    except TypeError:
        return None


def own_indices(
    count: int, *, slot: int, num_slots: int, seed: int, last: int | None = None
) -> list[int]:
    """Return the indices of a slot's samples: a random share, in ascending order.

    With `last`, a higher slot, the share is cut to the length of that slot's.

    Raises:
        DataError: there are fewer samples than slots.
    """
    if count < num_slots:
        raise DataError(
            "too little data to split among the members",
            given=f"{count} samples for {num_slots} members",
            expected="at least one sample per member",
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    share = order[slot::num_slots]
    if last is not None:
        share = share[: len(range(last, count, num_slots))]
    mine: list[int] = share.sort().values.tolist()
    return mine


def _own_loader(loader: Any, *, own: int, last: int, count_all: int, seed: int) -> Any:
    """Return a loader like the given one over the own samples; None if it has a custom order."""
    plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or not plain:
        return None
    mine = own_indices(len(loader.dataset), slot=own, num_slots=count_all, seed=seed, last=last)
    generator = torch.Generator().manual_seed(seed * 1_000 + own)
    shuffled = isinstance(loader.sampler, RandomSampler)
    samples = Subset(loader.dataset, mine)
    return DataLoader(
        samples,
        batch_size=loader.batch_size,
        sampler=ShardOrder(samples, generator=generator if shuffled else None),
        generator=generator,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
