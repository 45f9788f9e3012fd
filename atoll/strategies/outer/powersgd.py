"""PowerSGD: exchange gradients as products of two low-rank matrices.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (https://arxiv.org/abs/1905.13727), Algorithms 1 and 2. Legend: G_i a member's
gradient of one matrix (n x m), e_i its error, Q (m x r) common to all members.

    M_i = G_i + e_i
    P   = orthonormal(mean_i M_i Q)          first exchange
    Q_i = M_i^T P ;  Q = mean_i Q_i          second exchange; Q starts the next round
    G   = P Q^T ;    e_i = M_i - P Q_i^T

Each parameter of two or more dimensions is a matrix of its first dimension by all others; it is
compressed where that saves bytes. The rest (biases, norms) travels uncompressed with P. The inner
optimizer, of any kind, receives G as its gradient.

Differs from the paper:
  * momentum is the inner optimizer's, applied to G after decompression, not of our own;
  * means weigh by the tokens of the step, unless `weight = "equal"`;
  * P is made orthonormal, and P Q^T multiplied, in an order of additions that is the same on every
    machine, so that replicas stay equal bit for bit across kinds of processors;
  * Q is made orthonormal too before it is used: the same span, and less rounding;
  * a column of Q that has become zero (a gradient of lower rank) starts anew at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.seeds import mixed
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.every_step import PowerSGD
from atoll.strategies.base import Traffic
from atoll.strategies.outer.every_step_base import (
    GradientRounds,
    buffer_volume,
    dense_codec,
    one_round,
)
from atoll.strategies.outer.periodic import start_volume
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, Exchanging, hashed
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.exact_math import orthonormal, outer_sum, uniform
from atoll.task import Task
from atoll.wire.messages import RoundPlan


@dataclass(frozen=True, slots=True)
class Matrix:
    """One compressed parameter and its position in the flat vector."""

    place: slice
    rows: int
    columns: int
    rank: int

    def of(self, vector: Tensor) -> Tensor:
        """Return its view of a vector, shape (rows, columns)."""
        return vector[self.place].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts of a model are compressed."""

    matrices: list[Matrix]
    plain: list[slice]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], *, rank: int) -> Layout:
        """Return the layout of consecutive parameters of these shapes."""
        matrices: list[Matrix] = []
        plain: list[slice] = []
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            place, start = slice(start, start + size), start + size
            rows = shape[0] if len(shape) > 1 else 0
            columns = size // rows if rows else 0
            used = min(rank, rows, columns)
            if rows and used * (rows + columns) < size:
                matrices.append(Matrix(place, rows, columns, used))
            else:
                plain.append(place)
        return cls(matrices, plain)

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of values in the first and in the second exchange."""
        uncompressed = sum(place.stop - place.start for place in self.plain)
        left = sum(matrix.rank * matrix.rows for matrix in self.matrices)
        right = sum(matrix.rank * matrix.columns for matrix in self.matrices)
        return left + uncompressed, right


@dataclass(frozen=True, slots=True)
class Factors:
    """The result of a round's two exchanges."""

    left: list[Tensor]
    """P, orthonormal, float32: equal on every member."""
    mine: list[Tensor]
    """Q_i."""
    mean: list[Tensor]
    """Q: equal on every member."""
    plain: Tensor
    """The mean of the uncompressed parameters."""
    whole: Tensor | None = None
    """The mean of the full vector, if nothing was compressed."""


class PowerSGDOuter(GradientRounds[Factors]):
    """See the module's docstring."""

    def __init__(self, options: PowerSGD) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        for name, least in {"rank": 1, "warmup_steps": 0}.items():
            given = getattr(options, name)
            if given < least:
                raise ConfigError(f"{name} is too small", given=given, expected=f"{least} or more")
        self.options = options

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Lay the parameters out as matrices."""
        why = "it applies error feedback itself, and its factors change basis every round"
        dense_codec(codec, method="PowerSGD", why=why)
        super().setup(task, group=group, codec=codec)
        shapes = self._flat.shapes
        self._layout = Layout.of(shapes, rank=self.options.rank)
        self._error = self._flat.new().zero_()
        self._q = self._fresh(0)

    def _fresh(self, number: int) -> Tensor:
        """Return random factors in one vector, equal on every member."""
        return uniform(self._layout.sizes[1], seed=mixed(self.options.seed, number))

    def _factors(self, vector: Tensor) -> list[Tensor]:
        """Return the factors Q in a vector, each of shape (columns, rank)."""
        sizes = [matrix.columns * matrix.rank for matrix in self._layout.matrices]
        parts = torch.split(vector, sizes) if sizes else ()
        matrices = self._layout.matrices
        return [q.view(m.columns, m.rank) for q, m in zip(parts, matrices, strict=True)]

    def _plain(self, vector: Tensor) -> Tensor:
        """Return a copy of the uncompressed values."""
        return torch.cat([vector[:0], *(vector[place] for place in self._layout.plain)])

    def prepare(self, task: Task, gradient: Tensor) -> Exchanging[Factors]:
        """Exchange P, then Q."""
        wanted = gradient.add_(self._error)
        fresh = self._factors(self._fresh(task.round))
        start = [
            torch.where((q != 0.0).any(dim=0), q, new)
            for q, new in zip(map(_axes, self._factors(self._q)), fresh, strict=True)
        ]
        warm = task.step < self.options.warmup_steps

        def exchange(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Factors]:
            if not warm and plan.route != "alone":
                return self._exchange(floor, wanted, start)
            reduced = floor.reduce([wanted], codec=self._codec, key="whole")
            factors = Factors([], [], [], wanted[:0], whole=reduced.tensors[0])
            return ExchangeResult(factors, reduced.contributors, reduced.weight, reduced.digest)

        return exchange

    def _exchange(
        self, floor: ExchangeContext, wanted: Tensor, start: list[Tensor]
    ) -> ExchangeResult[Factors]:
        matrices = self._layout.matrices
        plain = self._plain(wanted)
        mine = [m.of(wanted) @ q for m, q in zip(matrices, start, strict=True)]
        first = floor.reduce([plain, *mine], codec=self._codec, key="p")
        if not matrices:
            factors = Factors([], [], [], first.tensors[0])
            return ExchangeResult(factors, first.contributors, first.weight, first.digest)
        left = [_axes(p) for p in first.tensors[1:]]
        mine = [m.of(wanted).T @ p for m, p in zip(matrices, left, strict=True)]
        second = floor.reduce(mine, codec=self._codec, key="q")
        factors = Factors(left, mine, second.tensors, first.tensors[0])
        both = tuple(name for name in first.contributors if name in second.contributors)
        return ExchangeResult(factors, both, second.weight, hashed(first.digest, second.digest))

    def apply(self, task: Task, value: Factors, *, counted: bool) -> float:
        """Multiply the factors and keep the approximation error."""
        wanted = self._gradient
        if value.whole is not None:
            self._error.zero_()
            self._write_gradients(value.whole)
            return float(value.whole.norm())
        for index, matrix in enumerate(self._layout.matrices):
            part, left = matrix.of(wanted), value.left[index]
            if counted:
                torch.sub(part, left @ value.mine[index].T, out=matrix.of(self._error))
            outer_sum(left, value.mean[index], out=part)
        parts = torch.split(value.plain, [p.stop - p.start for p in self._layout.plain])
        for place, part in zip(self._layout.plain, parts, strict=True):
            wanted[place] = part
        if value.mean:
            self._q = torch.cat([q.flatten() for q in value.mean])
        self._write_gradients(wanted)
        return float(wanted.norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return Q, which is common, and this member's error."""
        return super().state_dict() | {"shared.q": self._q, "own.error": self._error}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member starts without residuals."""
        super().load_state_dict(state)
        self._adopt("shared.q", self._q, state)
        self._adopt("own.error", self._error, state)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`.

        Uses the shapes of the model given to `setup`; for another number of elements it assumes one
        square matrix.
        """
        parameters, buffers = self._split(elements)
        layout = self._layout
        if parameters != self._flat.num_elements:
            side = math.isqrt(parameters)
            shapes = [(side, side), (parameters - side * side,)]
            layout = Layout.of(shapes, rank=self.options.rank)
        exchanges = [volume(self._codec, n, peers, rank=rank) for n in layout.sizes if n]
        beside = buffer_volume(buffers, peers, rank=rank)
        whole = volume(self._codec, parameters, peers, rank=rank)
        warm = min(steps, self.options.warmup_steps)
        return total(
            [
                start_volume(peers, rank=rank),
                times(one_round([whole, beside]), warm),
                times(one_round([*exchanges, beside]), steps - warm),
            ]
        )


def _axes(columns: Tensor) -> Tensor:
    """Return orthonormal columns, float32."""
    return orthonormal(columns).float()
