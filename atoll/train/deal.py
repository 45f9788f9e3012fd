"""Dealing out any data to the members of a job, by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from atoll.errors import DataError


class Share:
    """An iterable that ends early when the job is asked to stop."""

    def __init__(
        self,
        data: Any,
        *,
        slot: int,
        num_slots: int,
        should_stop: Callable[[], bool],
        length: int | None,
        last: int | None = None,
    ) -> None:
        """Give out the items `slot`, `slot + num_slots`, ... of `data`.

        With `last`, a higher slot, an item is given out only if that slot has one, too.
        """
        self.data, self._slot, self._num_slots = data, slot, num_slots
        self._should_stop, self._length = should_stop, length
        self._last = slot if last is None else last

    def __iter__(self) -> Iterator[Any]:
        own: Any = None
        for index, item in enumerate(self.data):
            if self._should_stop():
                return
            if index % self._num_slots == self._slot:
                own = item
            if index % self._num_slots == self._last:
                yield own

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
        data: A loader, a data set or an iterable.
        slot: Whose share.
        num_slots: Slots in all.
        seed: Of the order.
        should_stop: Asked before every item of a loader or an iterable.
        rank: Whose part of the share, where several processes train on a slot's share together.
        ranks: How many these are; all parts are equally long, what is left over is left out.

    Raises:
        DataError: there are fewer samples than slots.
    """
    own, last, count_all = slot * ranks + rank, slot * ranks + ranks - 1, num_slots * ranks
    if isinstance(data, DataLoader):
        loader = _own_loader(data, own=own, last=last, count_all=count_all, seed=seed)
        if loader is not None:
            return Share(loader, slot=0, num_slots=1, should_stop=should_stop, length=len(loader))
    count = length_of(data)
    if hasattr(data, "__getitem__") and count is not None:
        mine = own_indices(count, slot=own, num_slots=count_all, seed=seed, last=last)
        return Subset(data, mine)
    length = (count - last - 1) // count_all + 1 if count is not None else None
    return Share(
        data, slot=own, num_slots=count_all, should_stop=should_stop, length=length, last=last
    )


def length_of(data: Any) -> int | None:
    """Return how many items there are, or None; a loader of a stream only raises when asked."""
    try:
        return len(data)
    except TypeError:
        return None


def own_indices(
    count: int, *, slot: int, num_slots: int, seed: int, last: int | None = None
) -> list[int]:
    """Return which of `count` samples belong to a slot: a random share, in ascending order.

    With `last`, a higher slot, there are as many as that slot has.

    Raises:
        DataError: there are fewer samples than slots.
    """
    if count < num_slots:
        raise DataError(
            "too little data to deal out",
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
    """Return a loader like the given one of the own samples; None if its order is its own."""
    plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or not plain:
        return None
    mine = own_indices(len(loader.dataset), slot=own, num_slots=count_all, seed=seed, last=last)
    generator = torch.Generator().manual_seed(seed * 1_000 + own)
    return DataLoader(
        Subset(loader.dataset, mine),
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        generator=generator,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
