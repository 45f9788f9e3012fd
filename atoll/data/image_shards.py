"""Training images assigned to slots, so that no image is seen by two members in a pass.

Same interface as for text (`atoll.data.Shards`): a slot is leased to one member at a time, and its
cursor counts the images used.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.images import Images
from atoll.data.order import permutation
from atoll.data.shards import ORDERS
from atoll.errors import ConfigError, DataError, unknown

_ORDER_KEY = 0x696D6773


class ImageShards:
    """The images of every slot.

    A pure function of its arguments: every member computes the same assignment.
    """

    def __init__(self, images: Images, *, slots: int, seed: int, order: str = "shuffled") -> None:
        """Assign `images` to `slots`.

        Args:
            images: Kept, not copied.
            slots: Number of streams, usually the members at the start.
            seed: Determines the assignment.
            order: `shuffled`: at random, so that shards are alike. `contiguous`: sorted by class
                and cut,
                so that each slot has few classes, as data of different owners does.

        Raises:
            ConfigError: an unknown order, or no slots.
            DataError: fewer images than slots.
        """
        if order not in ORDERS:
            raise unknown("data order", order, ORDERS)
        if slots < 1:
            raise ConfigError("the data cannot be dealt", given=f"slots={slots}", expected="1")
        count = len(images)
        if count < slots:
            raise DataError(
                "too few images to train on",
                given=f"{count} images",
                expected=f"at least {slots}: one for each slot",
                remedy="name more images or fewer nodes",
            )
        self.slots, self.seed, self.order = slots, seed, order
        self._images = images
        if order == "contiguous":
            by_class = np.argsort(images.labels, kind="stable").astype(np.int64)
            self._chosen = np.array_split(by_class, slots)
        else:
            shuffled = permutation(count, key=(seed, _ORDER_KEY))
            self._chosen = [shuffled[slot::slots] for slot in range(slots)]

    def num_windows(self, slot: int) -> int:
        """Return the number of images in a slot's shard.

        Raises:
            ConfigError: no such slot.
        """
        if not 0 <= slot < self.slots:
            raise ConfigError("no such data slot", given=slot, expected=f"0 to {self.slots - 1}")
        return len(self._chosen[slot])

    def indices(self, slot: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, in the whole set, of some of a slot's images."""
        chosen: NDArray[np.int64] = self._chosen[slot][windows]
        return chosen

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return some images of a slot, fp32 ``(batch, 1, image, image)``, and their classes."""
        return self._images.batch(torch.from_numpy(self.indices(slot, windows)))
