"""Measuring the link during a mean, and agreeing on a codec in the same round; see `codec.auto`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from atoll.clock import Clock
from atoll.codec.auto import Auto
from atoll.codec.table import make_codec
from atoll.group.group import Group, Reduced
from atoll.group.policy import exactly
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)

KEY = "auto"
"""Names the exchange in which members say how fast their links are."""


class Choosing:
    """One round's mean, followed now and then by an exchange of 192 bytes about the links.

    Both are parts of one transaction: the members agree on the next codec or nothing happened. The
    codec of the mean itself was agreed on before.
    """

    def __init__(
        self, group: Group, auto: Auto, mean: Callable[[RoundPlan], Reduced], *, clock: Clock
    ) -> None:
        """Surround `mean`."""
        self._group, self._auto, self._mean, self._clock = group, auto, mean, clock
        self._told: Tensor | None = None
        self._measured: tuple[int, float] | None = None

    def exchange(self, plan: RoundPlan) -> Reduced:
        """Hold the mean, and say how fast the link is if it is time; changes no state."""
        self._told = self._measured = None
        began = self._clock.monotonic()
        reduced = self._mean(plan)
        if plan.route == "alone":
            return reduced
        taken_s = self._group.upload_s
        nbytes = reduced.sent_bytes
        if taken_s is None:
            # The direct route sends and receives at once; what it encodes is part of the time.
            taken_s = self._clock.monotonic() - began
        self._measured = nbytes, taken_s
        if not self._auto.due(plan.round):
            return reduced
        with exactly(self._group):
            work = self._group.reduce(
                [self._auto.ladder(measured=self._measured)],
                codec=make_codec("fp32"), weight=1.0, key=KEY,
            )  # fmt: skip
            told = work.wait()
        self._told = told.tensors[0]
        digest = hashlib.blake2b((reduced.digest + told.digest).encode(), digest_size=16)
        return replace(
            reduced,
            digest=digest.hexdigest(),
            sent_bytes=reduced.sent_bytes + told.sent_bytes,
            received_bytes=reduced.received_bytes + told.received_bytes,
        )

    def committed(self) -> None:
        """Take over what was measured and agreed on."""
        if self._measured is not None:
            self._auto.observe(*self._measured)
        if self._told is None:
            return
        before = self._auto.base.spec
        self._auto.agree(self._told)
        if self._auto.base.spec != before:
            log.info("the members' links suit codec %s, not %s", self._auto.base.spec, before)
