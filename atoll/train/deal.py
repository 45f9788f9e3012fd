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
    ) -> None:
        """Give out the items `slot`, `slot + num_slots`, ... of `data`."""
        self.data, self._slot, self._num_slots = data, slot, num_slots
        self._should_stop, self._length = should_stop, length

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self.data):
            if self._should_stop():
                return
            if index % self._num_slots == self._slot:
                yield item

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this data has no length")
        return self._length


def deal(
    data: Any, *, slot: int, num_slots: int, seed: int, should_stop: Callable[[], bool]
) -> Any:
    """Return a slot's share of some data; see :meth:`atoll.run.Run.shard`.

    Raises:
        DataError: there are fewer samples than slots.
    """
    if isinstance(data, DataLoader):
        loader = _own_loader(data, slot=slot, num_slots=num_slots, seed=seed)
        if loader is not None:
            return Share(loader, slot=0, num_slots=1, should_stop=should_stop, length=len(loader))
    count = length_of(data)
    if hasattr(data, "__getitem__") and count is not None:
        return Subset(data, own_indices(count, slot=slot, num_slots=num_slots, seed=seed))
    length = (count - slot - 1) // num_slots + 1 if count is not None else None
    return Share(data, slot=slot, num_slots=num_slots, should_stop=should_stop, length=length)


def length_of(data: Any) -> int | None:
    """Return how many items there are, or None; a loader of a stream only raises when asked."""
    try:
        return len(data)
    except TypeError:
        return None


def own_indices(count: int, *, slot: int, num_slots: int, seed: int) -> list[int]:
    """Return which of `count` samples belong to a slot: a random share, in ascending order.

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
    mine: list[int] = order[slot::num_slots].sort().values.tolist()
    return mine


def _own_loader(loader: Any, *, slot: int, num_slots: int, seed: int) -> Any:
    """Return a loader like the given one of the own samples; None if its order is its own."""
    plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or not plain:
        return None
    mine = own_indices(len(loader.dataset), slot=slot, num_slots=num_slots, seed=seed)
    generator = torch.Generator().manual_seed(seed * 1_000 + slot)
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
