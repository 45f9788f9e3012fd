"""One member's share of some data: which slot it reads, how far it is, and when a pass is over.

Every sample of a finite pass is to be in the work of some committed round. A round commits the
position of each contributor (see `atoll/rounds/data_slots.py`), and the hub leases the slot of a
lost member, at its committed position, to its replacement, or to the others in turn. Samples of
steps that were lost are therefore given again, and no others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, Subset, get_worker_info

from atoll.train.shares.sources import ItemSource, MapSource, Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopView:
    """What a share needs to know of the training loop that reads it."""

    should_stop: Callable[[], bool] = lambda: False
    step: Callable[[], int] = lambda: 0
    """Optimizer steps done."""
    unsettled: Callable[[], bool] = lambda: False
    """Whether members have come, gone or been left behind: slots may have no reader."""
    hold_round: Callable[[], None] = lambda: None
    """Synchronize the steps so far, after which slots are leased anew."""


class DataShare:
    """One slot's share of some data; it ends early when the job stops, and can be moved.

    A script's n-th iteration is pass n, counted from 0. A new process of a member begins at the
    committed position: the passes before it are empty, so a loop over epochs goes on where it was.
    """

    def __init__(self, source: Source, loop: LoopView | None = None) -> None:
        """Read `source`, the own slot first."""
        division = source.division
        self._source, self._loop = source, loop or LoopView()
        self._owner = f"{division.num_slots} slots, seed {division.seed}"
        self.slot, self.passes, self.offset = division.slot, 0, 0
        """Slot, its complete passes, and its samples given since."""
        self.samples_given = 0
        """Samples that this process has read."""
        self._sizes: dict[int, int | None] = {}
        self._number = -1
        """Pass of the script."""
        self._reading = False
        """Whether a loop stands inside a pass."""
        self._trained = self._moved = False
        self._open: dict[int, tuple[Iterator[Any], int, int]] = {}
        """Slot -> its items under way, with pass and offset."""

    # ------------------------------------------------------------------------- position

    @property
    def in_training(self) -> bool:
        """Whether optimizer steps are taken in the loop over it; an evaluation has none."""
        return self._trained or self._reading

    @property
    def begun(self) -> bool:
        """Whether the script has read it."""
        return self._number >= 0

    def place(self) -> dict[str, Any]:
        """Return the position, for `resume` of a share of the same division."""
        return {
            "owner": self._owner, "slot": self.slot, "passes": self.passes, "offset": self.offset,
        }  # fmt: skip

    def resume(self, place: Mapping[str, Any]) -> None:
        """Begin at a saved position."""
        if place.get("owner") != self._owner:
            log.warning("the data is divided anew, from its beginning: %s", self._owner)
        elif not self._reading:
            self.go_to(int(place["slot"]), passes=int(place["passes"]), offset=int(place["offset"]))

    def go_to(self, slot: int, *, passes: int, offset: int) -> None:
        """Continue with a slot from a position, at once also inside a pass."""
        if (slot, passes, offset) == (self.slot, self.passes, self.offset):
            return
        if not self._source.movable and (self.begun or slot != self.slot):
            log.warning(
                "the data of slot %d from sample %d of pass %d cannot be read here: an iterator "
                "starts once; give run.shard something that can be iterated again",
                slot, offset, passes,
            )  # fmt: skip
            return
        self.slot, self.passes, self.offset, self._moved = slot, passes, offset, True
        self._trained |= self.begun or passes > 0 or offset > 0

    def set_epoch(self, epoch: int) -> None:
        """Declare the number of the next pass, from 0; for scripts that save their own count."""
        self._number = epoch - 1

    # -------------------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:  # positions in a loader's workers are not known
            yield from self._source.open(self.slot, pass_=0, skip=0)
            return
        self._number += 1
        number, begun = self._number, False
        if self.passes < number and not self._moved:  # the script left the pass before
            self.passes, self.offset = number, 0
        if self.passes > number:
            log.info("pass %d of this data was done before this process began", number)
        while self.passes <= number or (begun and self._take_over(number)):
            self._moved = False
            items = self._items()
            for item in items:
                if self._loop.should_stop():
                    return
                self._give()
                begun, step = True, self._loop.step()
                self._open[self.slot] = (items, self.passes, self.offset)
                self._reading = True
                try:
                    yield item
                finally:
                    self._reading = False
                    self._trained |= self._loop.step() != step
                if self._moved:
                    break
            else:
                self._open.pop(self.slot, None)
                self.passes, self.offset = self.passes + 1, 0

    def _give(self) -> None:
        """Advance the position by one item; the last batch of a pass may be shorter."""
        size, stride = self.size(self.slot), self._source.stride
        if size is not None:
            stride = max(0, min(stride, size - self.offset))
        self.offset, self.samples_given = self.offset + stride, self.samples_given + stride

    @property
    def digest(self) -> int | None:
        """Digest of the order of all slots in this pass, if members might differ in it."""
        return self._source.digest

    def size(self, slot: int) -> int | None:
        """Return the number of samples in a pass of a slot, if it is known."""
        if slot not in self._sizes:
            self._sizes[slot] = self._source.size(slot)
        return self._sizes[slot]

    def _items(self) -> Iterator[Any]:
        """Return the slot's items from the position; those under way, if they are there."""
        items, *at = self._open.pop(self.slot, (None, 0, 0))
        if items is not None and at == [self.passes, self.offset]:
            return items
        return self._source.open(self.slot, pass_=self.passes, skip=self.offset)

    def _take_over(self, number: int) -> bool:
        """Return whether there is more to read in this pass, after a round that commits the rest.

        It may lease this member the data of a lost one, or fail and take back its own last steps.
        """
        if not self._trained or not self._loop.unsettled():
            return False
        self._loop.hold_round()
        return self.passes <= number

    def __len__(self) -> int:
        length = self._source.length()
        if length is None:
            raise TypeError("this data has no length")
        return length

    def __getstate__(self) -> dict[str, Any]:
        # For a loader's workers: they do not see the loop.
        return self.__dict__ | {"_loop": LoopView(), "_open": {}}


class StreamShare(DataShare, IterableDataset[Any]):
    """A share of an iterable; also a data set for a `DataLoader`, with or without workers."""

    _source: ItemSource

    def set_epoch(self, epoch: int) -> None:
        """Declare the number of the next pass, also to the data, as trainers do."""
        super().set_epoch(epoch)
        if hasattr(self._source.data, "set_epoch"):
            self._source.data.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source.data, name)


class DataSetShare(Subset[Any]):
    """A share of a data set with a length; iterated directly, its position is known.

    A `DataLoader` over it chooses an order of its own, so its position is not: that is logged once.
    """

    def __init__(self, data: Any, source: MapSource, loop: LoopView | None = None) -> None:
        """Contain the samples of the own slot."""
        super().__init__(data, source.indices)
        self.share = DataShare(source, loop)
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.share)

    def __getitem__(self, at: Any) -> Any:
        self._warn()
        return super().__getitem__(at)  # type: ignore[no-untyped-call]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return some samples, for a `DataLoader`."""
        self._warn()
        return super().__getitems__(indices)

    def _warn(self) -> None:
        worker = get_worker_info()
        if self._warned or (worker is not None and worker.id):
            return
        self._warned = True
        log.warning(
            "a loader picks from this share in an order that is not known here: after a kill its "
            "pass begins anew. Give run.shard the DataLoader instead of the data set"
        )
