"""The plain mean, piece by piece, while the rest of the contributions is still under way.

A member's line carries both directions at once. If the reducer waited for whole contributions, the
way down would stand still during the way up, and a round would take the sum of both instead of
little more than the longer one. So what every member has sent the beginning of is added up and goes
out at once, marked as early. Nothing else changes: the last pieces wait for the whole, and only
with them a member knows that the early ones count. If a member is lost, is refused or sends values
that a mean leaves out, they are forgotten, and the mean is formed again from what remains.

The arithmetic is that of :mod:`atoll.reducer.mean`, bit for bit. Early pieces exist for codecs
whose bytes are arrays of equal units (:mod:`atoll.codec.layout`), and only for the plain mean:
rules against liars need to see whole vectors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from atoll.codec.base import Packet
from atoll.codec.layout import LaidOut, Layout
from atoll.codec.registry import make_codec
from atoll.reducer.assembly import Assembly, Contribution
from atoll.reducer.mean import LARGE, Mean, Share, largest_of, mean_factors
from atoll.wire.chunks import ALL_TO_ALL, count_pieces
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)


class EarlyMean:
    """The mean of one exchange as far as it is known.

    Two threads use it: one notes what has arrived, one adds up.
    """

    def __init__(self, plan: RoundPlan, assembly: Assembly) -> None:
        """Wait for the first piece of every member."""
        self._plan, self._assembly = plan, assembly
        self._parts: tuple[Contribution, ...] = ()
        self._open = not (plan.verified or plan.unweighted)
        self._common = 0
        """Pieces of every member, as far as they were looked at."""
        self._wanted = 0
        """Elements that may be added up."""
        self._done = 0
        self._next = 0
        """The first piece of numbers that is not known."""
        self.sent: set[int] = set()
        """Pieces that went out."""

    def arrived(self) -> bool:
        """Return whether another whole piece can be added up; on the thread that receives."""
        parts = self._assembly.together() if self._open else ()
        common = min((part.prefix for part in parts), default=0)
        if common <= self._common:
            return False
        self._common = common
        if not self._parts:
            self._begin(parts)
        if not self._open:
            return False
        if any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            self._open = False
            return False
        there = self._layout.elements_in(self._common * CHUNK_BYTES)
        enough = there - self._wanted >= self._least and there < self._elements
        if enough:
            self._wanted = there
        return enough

    def _begin(self, parts: tuple[Contribution, ...]) -> None:
        first = parts[0]
        kinds = {(part.codec, part.sizes, part.aggregation) for part in parts}
        weights = [part.weight for part in parts]
        self._open = (
            len(kinds) == 1 and not first.aggregation and first.codec != ALL_TO_ALL
            and min(weights) > 0 and count_pieces(first.total_bytes) > 1
        )  # fmt: skip
        if not self._open:
            return
        self._codec = make_codec(first.codec).base
        self._packets = [Packet(part.data, part.codec, part.sizes) for part in parts]
        coder = self._codec.mean_codec(self._packets[0])
        self._elements = sum(first.sizes)
        if not isinstance(self._codec, LaidOut) or coder.spec != self._codec.spec:
            self._open = False
            return
        self._layout = Layout(self._codec.layout, self._elements)
        self._open = self._layout.total_bytes == first.total_bytes
        self._cut = self._codec.cut
        self._least = max(1, self._elements * CHUNK_BYTES // first.total_bytes)
        self._parts = parts
        self._factors, self._divisor = mean_factors(weights)
        self._weight = math.fsum(weights)
        named = {name for part in parts for name in part.contributors}
        self._contributors = tuple(name for name in self._plan.members if name in named)
        self._data = np.zeros(first.total_bytes, dtype=np.uint8)
        before = self._layout.spans(0, 0)[-1][0]  # scales, which are known last
        self._next = -(-before // CHUNK_BYTES)

    def pieces(self) -> list[int]:
        """Add up what has arrived; return the pieces to send; on the thread that adds up."""
        try:
            if not self._open or not self._add(self._wanted):
                return []
        except Exception:  # damaged bytes: the sum of whole contributions finds out whose
            log.debug("no early pieces", exc_info=True)
            self._open = False
            return []
        _, known = self._layout.spans(0, self._done)[-1]
        found = list(range(self._next, known // CHUNK_BYTES))
        self._next += len(found)
        self.sent.update(found)
        return found

    def mean(self) -> Mean:
        """Return the mean whose early pieces are in `sent`; the other bytes are not filled in."""
        packet = Packet(self._data.data, self._codec.spec, self._parts[0].sizes)
        return Mean(packet, self._contributors, self._weight)

    def whole(self, shares: Sequence[Share]) -> Mean | None:
        """Return the mean of complete contributions if they are those that were begun with.

        None: nothing was begun, or it does not count, and `sent` is empty.
        """
        same = len(shares) == len(self._parts) > 0 and all(
            share.packet.data is part.data and share.weight == part.weight
            for share, part in zip(shares, self._parts, strict=True)
        )
        try:
            if self._open and self.sent and same and self._add(self._elements):
                return self.mean()
        except Exception:  # damaged bytes: the sum of whole contributions finds out whose
            log.debug("early pieces do not count", exc_info=True)
        self._open = False
        self.sent.clear()
        return None

    def _add(self, stop: int) -> bool:
        """Add up to an element; return whether the mean is one that nobody is left out of."""
        start = self._done
        if stop > start:
            vector = torch.zeros(stop - start)
            for packet, factor in zip(self._packets, self._factors, strict=True):
                part = self._cut(packet, start, stop)
                self._codec.decode_add(part, out=vector, weight=factor)
            if self._divisor != 1.0:
                vector.div_(self._divisor)
            if not largest_of(vector) <= LARGE:  # the search for the guilty needs whole vectors
                self._open = False
                return False
            encoded = memoryview(self._codec.encode(vector, key="mean").data)
            for first, last in self._layout.spans(start, stop):
                self._data[first:last] = np.frombuffer(encoded[: last - first], dtype=np.uint8)
                encoded = encoded[last - first :]
            self._done = stop
        return True
