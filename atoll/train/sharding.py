"""Divide a script's data among the members of a job, by slot."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from atoll.train.shares.share import DataSetShare, DataShare, LoopView, StreamShare
from atoll.train.shares.sources import (
    Division,
    DrawnOrder,
    ItemSource,
    LoaderSource,
    MapSource,
    PlainOrder,
    SlotOrder,
    length_of,
)


def deal(data: Any, division: Division, loop: LoopView | None = None) -> DataShare | DataSetShare:
    """Return a slot's share of some data; see :meth:`atoll.run.Run.shard`.

    Args:
        data: A loader, a dataset or an iterable.
        division: The slot, and the rank in its member.
        loop: The loop that reads it.

    Raises:
        DataError: there are fewer samples than slots, or members cannot draw the same order.
    """
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            return StreamShare(ItemSource(data, division), loop)
        return DataShare(LoaderSource(data, _order(data, division), division), loop)
    if hasattr(data, "__getitem__") and length_of(data) is not None:
        return DataSetShare(data, MapSource(data, division), loop)
    return StreamShare(ItemSource(data, division), loop)


def _order(loader: Any, division: Division) -> SlotOrder:
    """Return the order of a loader's share: of its own, or dealt out from its sampler."""
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    if sampler is None:  # without batches
        sampler = loader.sampler
    count = length_of(loader.dataset)
    kind = type(sampler)
    whole = kind is RandomSampler and not sampler.replacement and sampler.num_samples == count
    if count is not None and (whole or kind is SequentialSampler):
        return PlainOrder(count, division, shuffled=whole)
    return DrawnOrder(sampler, division)
