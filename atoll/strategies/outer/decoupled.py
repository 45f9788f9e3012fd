"""Decoupled DiLoCo: fragments that no member waits for; directions and lengths averaged apart.

Douillard et al. 2026, "Decoupled DiLoCo for Resilient Distributed Pre-training"
(https://arxiv.org/abs/2604.21428). Streaming DiLoCo (`atoll.strategies.outer.streaming`) with

  * a result that is applied when it is there: a member goes on for up to `grace` steps beyond
    `delay`, and takes the common values of the fragment in place of its own (mix 0);
  * weights c^2 / s, with c the tokens and s the member's own steps since the fragment's last round:
    quantity times tokens per step;
  * radial-directional averaging, for every tensor of a numbered layer. Legend: v_i a member's
    update of the tensor, w_i its weight, phi(x) = x / |x|, phi(0) = 0.

        (sum_i w_i |v_i| / sum_i w_i) phi(sum_i w_i phi(v_i))

    Updates of members are nearly orthogonal, so their mean shrinks as 1 / sqrt(members) and the
    outer rate would have to follow. Embedding and head are averaged plainly.

With grace 0, weights by tokens and `merge = "mean"` it is Streaming DiLoCo, bit for bit.

Differs from the paper:
  * rounds take the place of the syncer: the fewest members, and the time for which late ones are
    awaited, which follows the measured spread, are those of every method (`min_nodes`, `quorum` in
    `[job]`). A member that a round did not wait for takes the state from another one;
  * clocks are the members' own by `pace`: a slow member does fewer steps between two rounds;
  * one fragment is in flight at a time, and layers are dealt to fragments in turns;
  * where directions cancel, their small mean is not stretched to the mean length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group, Reduced
from atoll.methods.overlapped import Decoupled
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.outer.periodic import WeightRule
from atoll.strategies.outer.streaming import StreamingOuter
from atoll.strategies.traffic import total, volume
from atoll.strategies.vectors.fragments import layer_of, names_of
from atoll.task import Task

MERGES = ("radial", "mean")
RATE = "rate"

CANCELLED = 1e-3
"""A mean of directions shorter than this has none."""


class OwnSteps(WeightRule):
    """Weighs by tokens times tokens per step of this member."""

    def __init__(self) -> None:
        """Start without steps."""
        super().__init__("tokens")
        self.done = 0

    def weight(self, task: Task) -> float:
        """Return the current weight; steps replace tokens where these are not counted."""
        tokens = max(task.tokens - self.tokens, 0)
        return tokens * (tokens / self.done) if tokens and self.done else float(self.done)

    def reset(self, task: Task) -> None:
        """Start counting from the current step."""
        super().reset(task)
        self.done = 0

    def state(self) -> Tensor:
        """Return the counters."""
        return torch.tensor([self.step, self.tokens, self.done])

    def load(self, state: Tensor) -> None:
        """Restore the counters."""
        self.step, self.tokens, self.done = (int(value) for value in state.tolist())


class DecoupledOuter(StreamingOuter):
    """See the module's docstring."""

    options: Decoupled

    def __init__(self, options: Decoupled, *, clock: Clock | None = None) -> None:
        """Check the options."""
        by_rate = options.weight == RATE
        super().__init__(replace(options, weight="tokens") if by_rate else options, clock=clock)
        if options.merge not in MERGES:
            raise ConfigError(
                "unknown way to merge updates", given=repr(options.merge),
                expected=f"one of {', '.join(MERGES)}",
            )  # fmt: skip
        if options.grace < 0:
            raise ConfigError("grace is too small", given=options.grace, expected="0 or more")
        self.options = options
        self._own_steps = [OwnSteps() for _ in range(options.fragments)] if by_rate else []
        if by_rate:
            self._weighers = list(self._own_steps)
        self._exact = make_codec("fp32")
        self._lengths: dict[int, Tensor] = {}
        """Of every tensor of the update that a fragment's running round sends."""

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as common state, cut into fragments."""
        super().setup(task, group=group, codec=codec)
        names = names_of(task.model, self._flat.tensors)
        trained = len(task.parameters())
        self._radial: list[list[slice]] = []
        for fragment in self._fragments:
            sizes, spans, start = fragment.of(self._flat.tensors).sizes, [], 0
            for piece, size in zip(fragment.pieces, sizes, strict=True):
                if piece.index < trained and layer_of(names[piece.index]):
                    spans.append(slice(start, start + size))
                start += size
            self._radial.append(spans if self.options.merge == "radial" else [])

    # --------------------------------------------------------------------------- clocks

    def sync(self, task: Task) -> SyncResult | None:
        """Begin a round if one is due; apply the result of the one under way once it is there."""
        for each in self._own_steps:
            each.done += 1
        flight = self._flight
        if flight is None or task.step < self._next or flight.work is None or flight.work.done():
            return super().sync(task)
        if task.step >= flight.step + self._schedule.delay + self.options.grace:
            return super().sync(task)  # waits
        self._plan(task)
        return None

    def _plan(self, task: Task) -> None:
        """Start the period until the next event; without a result yet, that is the next step."""
        super()._plan(task)
        if self._flight is not None and self._next <= task.step:
            self._next = task.step + 1
            task.begin_period(self._next, together=False)

    # ------------------------------------------------------------------------------ merging

    def outgoing(self, fragment: int, delta: Tensor) -> Tensor:
        """Return an update with all tensors of layers at length 1; remember their lengths."""
        spans = self._radial[fragment]
        if spans:
            lengths = torch.stack([delta[span].norm() for span in spans])
            for span, length in zip(spans, lengths.tolist(), strict=True):
                if length:
                    delta[span].div_(length)
            self._lengths[fragment] = lengths
        return delta

    def exchange_beside(self, fragment: int, weight: float) -> list[Reduced]:
        """Average the lengths, exactly."""
        if not self._radial[fragment]:
            return []
        work = self._round_client.group.reduce(
            [self._lengths[fragment]], codec=self._exact, weight=weight, key=f"lengths{fragment}"
        )
        return [work.wait()]

    def merged(self, fragment: int, mean: Tensor, beside: Iterator[Tensor]) -> Tensor:
        """Stretch the mean direction of every tensor to the mean length."""
        spans = self._radial[fragment]
        if not spans:
            return mean
        for span, length in zip(spans, next(beside).tolist(), strict=True):
            there = float(mean[span].norm())
            mean[span].mul_(length / there if there > CANCELLED else length)
        return mean

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        plain = super().traffic(elements, peers, steps=steps, rank=rank)
        lengths = [
            replace(volume(self._exact, len(self._radial[p]), peers, rank=rank), rounds=0)
            for which in self._schedule.rounds(steps)
            for p in which
            if self._radial[p]
        ]
        return total([plain, *lengths])
