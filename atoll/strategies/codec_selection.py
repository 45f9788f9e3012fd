"""Measure the link in every round and agree on a codec periodically (`codec.wrappers.auto`).

Also nests a codec's state in a strategy's state: its own part and the shared part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.codec.wrappers.auto import Auto
from atoll.group.aggregation import exactly
from atoll.group.base import Decidable, Group
from atoll.wire.messages import RoundPlan, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Decidable)

KEY = "auto"
"""Key of the exchange in which members report their link speeds."""


class CodecSelection:
    """Times the exchange of every round, and periodically adds a report of 192 bytes on the links.

    Both are part of one transaction: without a commit the codec stays. The round itself is encoded
    with the codec agreed on before.
    """

    def __init__(self, group: Group, auto: Auto, *, clock: Clock) -> None:
        """Measure for one codec."""
        self._group, self._auto, self._clock = group, auto, clock
        self._reported: Tensor | None = None
        self._measured: tuple[int, float] | None = None

    def around(self, exchange: Callable[[RoundPlan], T], plan: RoundPlan) -> T:
        """Run the exchange, and report the link speed if due; changes no state."""
        self._reported = self._measured = None
        began, sent, received = self._clock.monotonic(), *self._moved()
        found = exchange(plan)
        if plan.route == "alone":
            return found
        elapsed_s = self._clock.monotonic() - began
        ways = [now - before for now, before in zip(self._moved(), (sent, received), strict=True)]
        # Over the relay the mean arrives after all was sent; directly both overlap.
        self._measured = (max(ways) if plan.route == "direct" else sum(ways)), elapsed_s
        if self._auto.due(plan.round):
            with exactly(self._group):
                work = self._group.reduce(
                    [self._auto.ladder(measured=self._measured)],
                    codec=make_codec("fp32"), weight=1.0, key=KEY,
                )  # fmt: skip
                self._reported = work.wait().tensors[0]
        return found

    def committed(self, verdict: Verdict) -> None:
        """Apply what the committed round measured and agreed on, and what the hub has planned."""
        if self._measured is not None:
            self._auto.observe(*self._measured)
        before, reported = self._auto.base.spec, self._reported
        self._reported = self._measured = None
        if verdict.codec:
            self._auto.follow(verdict.codec, round_=verdict.round)
        elif reported is not None:
            self._auto.agree(reported)
        if self._auto.base.spec != before:
            log.info("codec %s replaces %s: it suits the links", self._auto.base.spec, before)

    def _moved(self) -> tuple[int, int]:
        return self._group.sent_bytes, self._group.received_bytes


_OWN, _SHARED = "own.codec.", "shared.codec."
_EQUAL = "shared."
"""Prefix of a codec's state keys that are equal on all members after a round."""


def codec_state(codec: Codec) -> dict[str, Tensor]:
    """Return a codec's state under `own.codec.*` and `shared.codec.*`, for a strategy's own."""
    return {
        _SHARED + name.removeprefix(_EQUAL) if name.startswith(_EQUAL) else _OWN + name: value
        for name, value in codec.state_dict().items()
    }


def load_codec_state(codec: Codec, state: Mapping[str, Tensor]) -> None:
    """Load a codec's part of a strategy's state; a joining member has the shared part only."""
    own = {k.removeprefix(_OWN): v for k, v in state.items() if k.startswith(_OWN)}
    shared = {
        _EQUAL + k.removeprefix(_SHARED): v for k, v in state.items() if k.startswith(_SHARED)
    }
    codec.load_state_dict(own | shared)
