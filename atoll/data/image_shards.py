"""Training images assigned to slots, so that no image is seen by two members in a pass.

The interface is that of text (`atoll.data.Shards`); a cursor counts images.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.images import Images
from atoll.data.order import permutation
from atoll.data.pictures import Pictures
from atoll.data.shards import ORDERS
from atoll.errors import ConfigError, DataError, unknown

_ORDER_KEY = 0x696D6773


class ImageShards:
    """The images of every slot; a pure function of its arguments, the same on every member."""

    def __init__(
        self, images: Images | Pictures, *, slots: int, seed: int, order: str = "shuffled"
    ) -> None:
        """Assign `images` (not copied) to `slots`, usually the members at the start.

        `order` is `shuffled` (random, so that shards are alike) or `contiguous` (sorted by class
        and cut, so that each slot has few classes, like data of different owners).

        Raises:
            ConfigError: an unknown order, or no slots.
            DataError: fewer images than slots.
        """
        if order not in ORDERS:
            raise unknown("data order", order, ORDERS)
        if slots < 1:
            raise ConfigError("the data cannot be split", given=f"slots={slots}", expected="1")
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
        """Return the number of images of a slot; raises ConfigError if there is no such slot."""
        if not 0 <= slot < self.slots:
            raise ConfigError("no such data slot", given=slot, expected=f"0 to {self.slots - 1}")
        return len(self._chosen[slot])

    def indices(self, slot: int, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the whole set of some images of a slot."""
        chosen: NDArray[np.int64] = self._chosen[slot][windows]
        return chosen

    def batch(self, slot: int, windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return images of a slot, fp32 ``(batch, 1, image, image)``, and their classes."""
        return self._images.batch(torch.from_numpy(self.indices(slot, windows)))
