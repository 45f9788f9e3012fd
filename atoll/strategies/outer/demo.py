"""DeMo: members keep separate momenta and send their largest DCT coefficients.

Peng et al. 2024, "DeMo: Decoupled Momentum Optimization" (https://arxiv.org/abs/2411.19870).
Legend: g_i a member's gradient, d_i its momentum, z coefficients of the cosine transform of each
piece, beta = `decay`, k = `topk`.

    d_i   = beta d_i + lr g_i
    z_i   = the k largest coefficients of every piece of d_i
    d_i   = d_i - what z_i stands for
    z     = for every coefficient the mean over the members that sent it
    theta = (1 - lr * weight_decay) theta - lr sign(what z stands for)

The method replaces the inner optimizer: it uses only that optimizer's `lr` and `weight_decay`, not
its update rule or gradient clipping. Learning rates are those of Adam. The codec encodes the
coefficients; each position takes two bytes. The codec's rounding error stays in the momentum.

Differs from the paper and its code:
  * positions are of 2 bytes, values of the codec's (the code sends 8 and 4);
  * a dimension without a useful divisor, e.g. a prime, is padded instead of sent whole;
  * decoding is in double precision and in member order, and what is zero but for rounding counts
    as zero, so that all members take the same signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.codec.sparse.cosine import Pieces, cosines
from atoll.errors import ConfigError, GroupError, WireError
from atoll.group.base import AllToAllResult, Group, PeerMessage
from atoll.methods.every_step import DeMo
from atoll.strategies.base import Traffic
from atoll.strategies.outer.base import own_step
from atoll.strategies.outer.every_step_base import GradientRounds, buffer_volume, one_round
from atoll.strategies.outer.periodic import start_volume
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, Exchanging
from atoll.strategies.traffic import all_to_all_volume, times, total
from atoll.task import Task
from atoll.wire.messages import RoundPlan

POSITION_BYTES = 2
LARGEST_SIDE = 256
"""Pieces have at most 256 x 256 values, so that a position fits in two bytes."""
NOTHING = 1e-12
"""Values below this share of a tensor's largest one count as rounding error."""


class Spectrum:
    """The pieces of a model's parameters and their transform."""

    def __init__(self, shapes: Sequence[Sequence[int]], *, side: int, topk: int) -> None:
        """Cut parameters of these shapes into pieces."""
        self.pieces = [Pieces.of(shape, limit=side) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in shapes]
        self.topk = topk
        sides = {each for p in self.pieces for each in (p.height, p.width)}
        self._cosines = {side: cosines(side) for side in sides}

    @property
    def sent(self) -> int:
        """Coefficients per packet."""
        return sum(p.count * min(self.topk, p.size) for p in self.pieces)

    def choose(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest coefficients: positions within their pieces, and values."""
        positions: list[Tensor] = []
        values: list[Tensor] = []
        for piece, part in zip(self.pieces, torch.split(vector, self.sizes), strict=True):
            found = piece.coefficients(part, *self._sides(piece, torch.float32))
            kept = min(self.topk, piece.size)
            chosen = found.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
            positions.append(chosen.flatten())
            values.append(found.gather(1, chosen).flatten())
        empty = vector[:0]
        return torch.cat([empty.long(), *positions]), torch.cat([empty, *values])

    @cached_property
    def offsets(self) -> Tensor:
        """Start of each sent coefficient's piece among all coefficients."""
        ends = self._piece_sizes.cumsum(0)
        return (ends - self._piece_sizes).repeat_interleave(self._kept_sizes)

    @cached_property
    def limits(self) -> Tensor:
        """Size of each sent coefficient's piece."""
        return self._piece_sizes.repeat_interleave(self._kept_sizes)

    @property
    def _piece_sizes(self) -> Tensor:
        return torch.tensor([p.size for p in self.pieces for _ in range(p.count)]).long()

    @property
    def _kept_sizes(self) -> Tensor:
        return self._piece_sizes.clamp(max=self.topk)

    @property
    def coefficients(self) -> int:
        """Coefficients of all pieces."""
        return sum(p.count * p.size for p in self.pieces)

    def values(self, coefficients: Tensor) -> Tensor:
        """Return the inverse transform as a vector, float32."""
        return torch.cat([coefficients[:0], *self._parts(coefficients, torch.float32)])

    def signs(self, coefficients: Tensor) -> Tensor:
        """Return the signs of the inverse transform, float32."""
        signs = [coefficients[:0]]
        for part in self._parts(coefficients, torch.float64):
            if part.numel():
                part[part.abs() <= NOTHING * part.abs().max()] = 0.0
            signs.append(part.sign().float())
        return torch.cat(signs)

    def _parts(self, coefficients: Tensor, kind: torch.dtype) -> Iterator[Tensor]:
        """Yield every parameter's values, computed in the given dtype."""
        sizes = [p.count * p.size for p in self.pieces]
        for piece, part in zip(self.pieces, torch.split(coefficients, sizes), strict=True):
            yield piece.values(part.to(kind), *self._sides(piece, kind))

    def _sides(self, piece: Pieces, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._cosines[piece.height].to(kind), self._cosines[piece.width].to(kind)


class DeMoOuter(GradientRounds[Tensor]):
    """See the module's docstring."""

    def __init__(self, options: DeMo) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if not 0.0 <= options.decay < 1.0:
            raise ConfigError("decay is out of range", given=options.decay, expected="0 to below 1")
        if options.topk < 1:
            raise ConfigError("topk is too small", given=options.topk, expected="1 or more")
        if not 1 <= options.side <= LARGEST_SIDE:
            raise ConfigError("side is out of range", given=options.side, expected="1 to 256")
        self.options = options

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Cut the task's parameters into pieces.

        Raises:
            ConfigError: the codec cannot carry coefficients.
        """
        if codec.needs_allgather or codec.base is not codec:
            raise ConfigError(
                f"DeMo cannot use codec {codec.spec}",
                given="what is not sent stays in the momentum already",
                expected="a codec that sends every number and keeps no state",
                remedy='codec = "bf16"',
            )
        super().setup(task, group=group, codec=codec)
        options = self.options
        shapes = self._flat.shapes
        self._spectrum = Spectrum(shapes, side=options.side, topk=options.topk)
        self._momentum = self._flat.new().zero_()

    def prepare(self, task: Task, gradient: Tensor) -> Exchanging[Tensor]:
        """Update the momentum and send its largest coefficients."""
        self._moved = self._momentum * self.options.decay
        rates = {
            id(p): float(group["lr"])
            for group in task.optimizer.param_groups
            for p in group["params"]
        }
        parts = zip(self._parameters, self._flat.views(self._moved), strict=True)
        for (parameter, moved), part in zip(parts, self._flat.views(gradient), strict=True):
            moved.add_(part, alpha=rates.get(id(parameter), 0.0))
        positions, values = self._spectrum.choose(self._moved.float())
        self._codec.set_round(task.round)
        packet = self._codec.encode(values.contiguous(), key="coefficients")
        self._kept = self._scattered(positions, self._codec.decode(packet))
        where = positions.numpy().astype("<u2").tobytes()
        sent = Packet(b"".join((packet.data, where)), f"demo:{packet.codec}", packet.sizes)

        def exchange(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Tensor]:
            if plan.route == "alone":
                return ExchangeResult(self._kept, (floor.group.me,), floor.weight, "alone")
            return self._mean(floor.all_to_all([PeerMessage(tuple(plan.members), sent)]))

        return exchange

    def _scattered(self, positions: Tensor, values: Tensor) -> Tensor:
        """Return all coefficients, zero where none was sent."""
        whole = torch.zeros(self._spectrum.coefficients)
        whole[self._spectrum.offsets + positions] = values
        return whole

    def _mean(self, got: AllToAllResult) -> ExchangeResult[Tensor]:
        """Return each coefficient's mean over the members that sent it, in member order.

        Members with an invalid packet are left out; all members see the same packets.

        Raises:
            GroupError: no member sent a valid packet.
        """
        total = torch.zeros(self._spectrum.coefficients)
        weights, offsets = torch.zeros_like(total), self._spectrum.offsets
        contributors: list[str] = []
        for member, packets in got.packets.items():
            opened = self._open(packets[0]) if packets else None
            if opened is None:
                continue
            contributors.append(member)
            weight, at = got.weights[member], offsets + opened[0]
            total[at] += weight * opened[1]
            weights[at] += weight
        if not contributors:
            raise GroupError("there is nothing to average", given="no usable coefficients")
        total /= weights.where(weights > 0, 1.0)
        weight = math.fsum(got.weights[member] for member in contributors)
        return ExchangeResult(total, tuple(contributors), weight, got.digest)

    def _open(self, packet: Packet) -> tuple[Tensor, Tensor] | None:
        """Return a packet's positions and values; None if it is invalid."""
        count, data = self._spectrum.sent, memoryview(packet.data)
        edge = self._codec.nbytes(count)
        if len(data) != edge + POSITION_BYTES * count:
            return None
        try:
            values = self._codec.decode(Packet(data[:edge], self._codec.spec, (count,)))
        except WireError:
            return None
        raw = np.frombuffer(data[edge:], dtype="<u2").astype(np.int64)
        positions = torch.from_numpy(raw)
        usable = bool((positions < self._spectrum.limits).all() and values.isfinite().all())
        return (positions, values) if usable else None

    def apply(self, task: Task, value: Tensor, *, counted: bool) -> float:
        """Subtract the sent part from the momentum and step along the signs."""
        self._momentum = self._moved
        if counted:
            self._momentum -= self._spectrum.values(self._kept)
        direction = self._spectrum.signs(value)
        own_step(task, self._flat, direction)
        return float(direction.norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the own momentum."""
        return super().state_dict() | {"own.momentum": self._momentum}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member starts without momentum."""
        super().load_state_dict(state)
        self._adopt("own.momentum", self._momentum, state)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`.

        Uses the shapes of the model given to `setup`; for another number of elements it assumes one
        square matrix.
        """
        parameters, buffers = self._split(elements)
        spectrum = self._spectrum
        if parameters != self._flat.num_elements:
            side = math.isqrt(parameters)
            shapes = [(side, side), (parameters - side * side,)]
            spectrum = Spectrum(shapes, side=self.options.side, topk=self.options.topk)
        nbytes = self._codec.nbytes(spectrum.sent) + POSITION_BYTES * spectrum.sent
        others = peers - 1
        each = all_to_all_volume([(nbytes, others)] if others else [], [nbytes] * others)
        each = one_round([each, buffer_volume(buffers, peers, rank=rank)])
        return total([start_volume(peers, rank=rank), times(each, steps)])
