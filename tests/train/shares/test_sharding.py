"""What members deal out among them is the whole, each item once, whatever draws or loads it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from atoll.errors import DataError
from atoll.train.sharding import deal
from atoll.train.shares.seeded_draws import seeded_draws
from atoll.train.shares.share import DataSetShare, StreamShare
from atoll.train.shares.sources import Division

SAMPLES, SEED = 90, 5
DATA = TensorDataset(torch.arange(SAMPLES))


class OwnOrder(Sampler[int]):
    """A sampler of the script with random numbers of its own kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.endless = kind, False
        self.python = random.Random()
        self.numpy = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        match self.kind:
            case "python":
                self.python.shuffle(order)
            case "global python":
                random.shuffle(order)
            case "numpy":
                self.numpy.shuffle(order)
            case "global numpy":
                np.random.shuffle(order)
            case "fresh":
                np.random.default_rng().shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


def shares(make: Any, *, members: int) -> list[Any]:
    """Return what `deal` gives every member, each with objects of its own."""
    found = []
    for slot in range(members):
        torch.manual_seed(slot)  # members' own random numbers differ
        random.seed(slot)
        np.random.seed(slot)
        found.append(deal(make(), Division(slot, members, SEED)))
    return found


def samples(share: Any) -> list[int]:
    return [int(x) for (batch,) in share for x in batch]


def by_sampler(make: Any) -> Any:
    return lambda: DataLoader(DATA, batch_size=4, sampler=make())


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(by_sampler(partial(OwnOrder, kind)), id=kind)
        for kind in ("python", "global python", "numpy", "global numpy")
    ]
    + [
        pytest.param(by_sampler(lambda: SubsetRandomSampler(range(SAMPLES))), id="subset"),
        pytest.param(
            lambda: DataLoader(
                DATA, batch_sampler=BatchSampler(OwnOrder("python"), 4, drop_last=False)
            ),
            id="batches",
        ),
    ],
)
def test_an_order_of_the_scripts_own_is_dealt_out_once(make: Any, members: int) -> None:
    dealt = shares(make, members=members)
    first = [samples(share) for share in dealt]
    assert sorted(chain(*first)) == list(range(SAMPLES))
    second = [samples(share) for share in dealt]
    assert sorted(chain(*second)) == list(range(SAMPLES))
    assert first != second, "another order in every pass"


@pytest.mark.parametrize("members", [2, 3])
def test_weighted_draws_are_the_same_draws_on_every_member(members: int) -> None:
    """With replacement a sample may come twice: what counts is that all draws are dealt out."""

    def sampler() -> Any:
        return WeightedRandomSampler([1.0 + n % 3 for n in range(SAMPLES)], SAMPLES)

    dealt = shares(by_sampler(sampler), members=members)
    for pass_ in range(2):
        expected = Counter(seeded_draws(sampler(), seed=SEED, pass_=pass_))
        assert Counter(chain(*map(samples, dealt))) == expected
    repeated = shares(
        by_sampler(lambda: RandomSampler(DATA, replacement=True, num_samples=40)), members=members
    )
    assert sum(len(samples(share)) for share in repeated) == 40


def test_drawing_leaves_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(1), random.random()
    torch.manual_seed(1)
    random.seed(1)
    samples(deal(by_sampler(lambda: OwnOrder("global python"))(), Division(0, 2, SEED)))
    assert (torch.rand(1), random.random()) == expected


def test_a_sampler_that_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(DataError, match="OwnOrder draws another order each time"):
        deal(by_sampler(lambda: OwnOrder("fresh"))(), Division(0, 2, SEED))


# ----------------------------------------------------------------------------- iterables


class Stream(IterableDataset[int]):
    """Yields numbers; it may leave the items of other workers out, as many such data sets do."""

    def __init__(self, *, by_worker: bool = False, count: int = 37) -> None:
        self.by_worker, self.count, self.epoch = by_worker, count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, apart = (info.id, info.num_workers) if self.by_worker and info else (0, 1)
        return iter(range(first, self.count, apart))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by_worker", [False, True])
@pytest.mark.parametrize("members", [1, 2])
def test_a_stream_is_dealt_out_once_through_loaders(
    members: int, by_worker: bool, workers: int
) -> None:
    found: list[int] = []
    for slot in range(members):
        share = deal(Stream(by_worker=by_worker), Division(slot, members, SEED))
        loader = DataLoader(share, batch_size=4, num_workers=workers)  # type: ignore[arg-type]
        found += [int(x) for batch in loader for x in batch]
    assert sorted(found) == list(range(37))


def test_a_stream_has_no_length_and_keeps_its_methods() -> None:
    share: Any = deal(Stream(), Division(1, 2, SEED))
    assert isinstance(share, StreamShare)
    assert isinstance(share, IterableDataset)
    with pytest.raises(TypeError, match="no length"):
        len(share)
    share.set_epoch(4)
    assert (share.by_worker, share.count, share.epoch) == (False, 37, 4)
    again = deal((x for x in range(5)), Division(1, 2, SEED))
    assert [int(x) for x in DataLoader(again, batch_size=None)] == [1, 3]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("shuffle", [True, False])
def test_other_ranks_or_rows_go_on_at_the_same_sample(shuffle: bool) -> None:
    def rank(number: int, ranks: int, batch: int) -> Any:
        loader = DataLoader(DATA, batch_size=batch, shuffle=shuffle)
        return deal(loader, Division(1, 2, SEED, rank=number, ranks=ranks))

    before = [rank(number, 2, 3) for number in range(2)]
    read: list[int] = []
    for share in before:
        rows = iter(share)
        read += [int(x) for _ in range(4) for x in next(rows)[0]]
    alone = rank(0, 1, 5)
    alone.resume(before[0].place())
    whole = samples(rank(0, 1, 1))
    assert sorted(read + samples(alone)) == sorted(whole)
    assert len(whole) == SAMPLES // 2


def test_passes_done_before_are_empty() -> None:
    share: Any = deal(DataLoader(DATA, batch_size=4, shuffle=True), Division(0, 2, SEED))
    passes = [samples(share) for _ in range(3)]
    again: Any = deal(DataLoader(DATA, batch_size=4, shuffle=True), Division(0, 2, SEED))
    again.go_to(0, passes=1, offset=8)
    assert [samples(again) for _ in range(3)] == [[], passes[1][8:], passes[2]]
    later: Any = deal(DataLoader(DATA, batch_size=4, shuffle=True), Division(0, 2, SEED))
    later.go_to(0, passes=1, offset=8)
    later.set_epoch(1)
    assert samples(later) == passes[1][8:]


def test_a_share_follows_a_move_in_the_middle_of_a_pass() -> None:
    def fresh(slot: int) -> Any:
        return deal(DataLoader(DATA, batch_size=5, shuffle=True), Division(slot, 2, SEED))

    other = samples(fresh(1))
    share, found = fresh(0), []
    for number, (rows,) in enumerate(share):
        found.append(rows.tolist())
        if number == 3:
            share.go_to(1, passes=0, offset=10)
        if number == 5:
            share.go_to(0, passes=0, offset=20)
    own = samples(fresh(0))
    assert list(chain(*found)) == own[:20] + other[10:20] + own[20:]


def test_an_iterator_that_starts_once_is_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    share: Any = deal(iter(range(10)), Division(0, 2, SEED))
    rows = iter(share)
    assert next(rows) == 0
    share.go_to(1, passes=0, offset=3)
    assert list(rows) == [2, 4, 6, 8]
    assert "cannot be read here" in caplog.text


def test_a_loader_over_a_share_says_once_what_is_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    share = deal(DATA, Division(0, 2, SEED))
    assert isinstance(share, DataSetShare)
    assert len(list(share)) == SAMPLES // 2
    assert caplog.text == ""
    list(DataLoader(share, batch_size=4, shuffle=True))
    assert caplog.text.count("Give run.shard the DataLoader") == 1
