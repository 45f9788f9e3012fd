"""A residual stream that stays in a subspace, so that stages exchange few numbers per token.

Subspace networks (Ramasinghe et al., https://arxiv.org/abs/2506.01260). Every matrix that writes
the residual stream writes only inside the span of `basis`; what an embedding adds outside of it is
frozen, and every stage has it as a table. Between stages a token is K numbers:

  send     z = (x - table[token]) U
  receive  x = z Uᵀ + table[token]

The gradient of these lines is exact: what it drops would move weights out of the subspace.

Legend: d width, K numbers of a token, U basis (d, K) with UᵀU = I, V tokens.

Differs from the paper:
  * The table is what the model's own embedding has outside of the subspace, not another random
    one. The embedding stays one parameter: a checkpoint is that of a plain model, from which the
    table can be read again. In a new model it is scaled to the size of what blocks write, as in the
    paper: the usual initialization would be negligible beside that, and tokens would have to be
    told apart inside the subspace.
  * Any optimizer that treats elements one by one, or keeps the space of the columns as Muon does,
    steps on the coordinates of the weights. The paper changes AdamW such that all rows share one
    second moment; projecting after steps on the weights themselves loses most of such a step.

Needs no process group: processes that each hold one stage use it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import torch
from torch import Tensor, nn

from atoll.codec.seeds import mixed, random_words
from atoll.errors import ConfigError
from atoll.models.contract import ResidualStream

SEED = 1
"""Of the basis: the same in every job, so that members and later starts have the same subspace."""

FAR = 1e-3
"""Part of a weight outside the subspace, relative to its norm, that no rounding explains."""

TABLE_STD = 0.4
"""Of a new model's table, per dimension outside the subspace."""

CAN = 'name = "gpt" or "llama" in [model], with tie = false and dropout = 0'


class Subspace:
    """The span of an orthonormal basis, and projections onto it."""

    def __init__(self, basis: Tensor) -> None:
        """Take an orthonormal basis, (d, K)."""
        self.basis = basis

    @classmethod
    def drawn(cls, width: int, size: int, *, seed: int) -> Subspace:
        """Draw a subspace in fp64, equal on all machines up to rounding; the whole has basis I."""
        if size == width:
            return cls(torch.eye(width, dtype=torch.float64))
        uniform = (random_words(mixed("subspace", seed, width, size), 2 * width * size) >> 11) * (
            2.0**-53
        )
        first, second = uniform.reshape(2, width, size)
        normal = np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)
        return cls(_orthonormal(torch.from_numpy(normal)))

    @property
    def width(self) -> int:
        """Features of the space, d."""
        return len(self.basis)

    @property
    def size(self) -> int:
        """Dimensions of the subspace, K."""
        return self.basis.shape[1]

    @property
    def whole(self) -> bool:
        """Whether the subspace is the space: nothing is projected then."""
        return self.size == self.width

    def of(self, like: Tensor) -> Tensor:
        """Return the basis in the type and on the device of a tensor."""
        return self.basis.to(device=like.device, dtype=like.dtype)

    def rows(self, x: Tensor) -> Tensor:
        """Return the part of each row of `x`, (..., d), inside the subspace."""
        basis = self.of(x)
        return x if self.whole else (x @ basis) @ basis.mT

    def columns(self, weight: Tensor) -> Tensor:
        """Return the part of each column of `weight`, (d, n), inside the subspace."""
        basis = self.of(weight)
        return weight if self.whole else basis @ (basis.mT @ weight)

    def outside(self, embedding: Tensor) -> Tensor:
        """Return the table of an embedding, (V, d): the part of each row outside the subspace."""
        return embedding - self.rows(embedding)

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the coordinates of rows, (..., d) -> (..., K)."""
        return x if self.whole else x @ self.of(x)

    def restored(self, z: Tensor) -> Tensor:
        """Return rows from their coordinates, (..., K) -> (..., d)."""
        return z if self.whole else z @ self.of(z).mT

    def refreshed(self, drift: Tensor, *, total: Tensor, rate: float) -> Subspace:
        """Return a subspace turned towards the gradients that this one drops.

        One step on the Grassmannian against the gradients' energy outside. Weights and table MUST
        be projected anew with the result, on all stages at once.

        Args:
            drift: Sum of gᵀg U over the activation gradients g, (n, d), of a boundary: (d, K).
            total: Sum of their squares, a scalar.
            rate: Length of the step, after `drift` is divided by `total`.
        """
        if self.whole:
            return self
        basis = self.basis.double()
        drift = drift.to(basis) / total.to(basis).clamp_min(torch.finfo(torch.float64).tiny)
        drift = drift - basis @ (basis.mT @ drift)
        return Subspace(_orthonormal(basis + rate * drift).to(self.basis))


class TokenBoundary:
    """Packs and unpacks the residual stream at a boundary between stages."""

    def __init__(self, subspace: Subspace, table: Tensor) -> None:
        """Use an embedding's `table`, (V, d), equal on both sides; see :meth:`Subspace.outside`."""
        self.subspace, self.table = subspace, table
        self._measured: Tensor | None = None
        self.measures = True
        """Whether this side of the boundary takes part in measuring."""

    def measure(self, *, enabled: bool) -> None:
        """Sum up the energy of the gradients that come back from now on, or no longer."""
        width, size = self.subspace.basis.shape
        self._measured = None
        if enabled:
            like = self.subspace.basis
            self._measured = torch.zeros(width + 1, size, dtype=torch.float64, device=like.device)

    def measured(self) -> Tensor:
        """Return the sums, (d + 1, K), and end: gᵀg U, and the sum of squares in the last row."""
        found, self._measured = self._measured, None
        if found is None:
            raise RuntimeError("`measure` comes first")
        return found

    def pack(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what is sent of activations, (..., d), of tokens, (...): (..., K)."""
        if self.subspace.whole:
            return x
        return self.subspace.coordinates(x - self._of(tokens, x))

    def unpack(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Return activations, (..., d), from what was sent, (..., K)."""
        if self.subspace.whole:
            return z
        x = self.subspace.restored(z) + self._of(tokens, z)
        if self._measured is not None and x.requires_grad and self.measures:
            x.register_hook(self._note)  # type: ignore[no-untyped-call]
        return x

    def _note(self, gradient: Tensor) -> None:
        if self._measured is not None:
            g = gradient.detach().reshape(-1, gradient.shape[-1]).double()
            self._measured[:-1] += g.mT @ (g @ self.subspace.basis.double())
            self._measured[-1, 0] += g.square().sum()

    def _of(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.table[tokens].to(like.dtype)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Keeps a stage's parameters such that its activations can be packed."""

    subspace: Subspace
    writers: Sequence[nn.Parameter]
    """Matrices (d, n) that write the residual stream."""
    embedding: nn.Parameter | None
    """The token embedding, (V, d), if the stage has it."""
    table: Tensor | None
    """What it has outside the subspace."""

    @classmethod
    def of(
        cls,
        stage: Mapping[str, nn.Parameter],
        stream: ResidualStream,
        subspace: Subspace,
        table: Tensor,
    ) -> Constraint:
        """Constrain a stage's parameters, by their names in the whole model.

        The last stage needs no constraint, because it sends no activations.
        """
        writers = [p for name, p in stage.items() if _writes(name, stream)]
        embedding = stage.get(f"{stream.embedding}.weight")
        return cls(subspace, writers, embedding, table)

    @torch.no_grad()
    def project(self) -> None:
        """Project the parameters, in place."""
        if self.subspace.whole:
            return
        for weight in self.writers:
            weight.copy_(self.subspace.columns(weight))
        if self.embedding is not None and self.table is not None:
            inside = self.subspace.rows(self.embedding - self.table.to(self.embedding.dtype))
            self.embedding.copy_(inside + self.table)

    @torch.no_grad()
    def settle(self) -> None:
        """Project the parameters if one is outside by more than rounding; else keep every bit.

        Copies of a stage that come from different members so stay equal.
        """
        outside = [weight - self.subspace.columns(weight) for weight in self.writers]
        owned = list(self.writers)
        if self.embedding is not None and self.table is not None:
            outside.append(self.subspace.outside(self.embedding) - self.table)
            owned.append(self.embedding)
        far = (o.norm() > FAR * p.norm() for o, p in zip(outside, owned, strict=True))
        if any(far):
            self.project()

    @contextmanager
    def in_coordinates(self) -> Iterator[None]:
        """Let an optimizer step on coordinates: K numbers per column of a writer, or per token.

        Inside, the first K rows of a writer (columns of the embedding) and of its gradient hold
        them, and the rest is zero. An optimizer that treats elements one by one leaves zeros alone,
        so its step stays in the subspace, and its state is one of coordinates, in the usual shapes.
        """
        if self.subspace.whole:
            yield
            return
        size = self.subspace.size
        with torch.no_grad():
            for weight in self.writers:
                basis = self.subspace.of(weight)
                for tensor in _with_gradient(weight):
                    tensor[:size], tensor[size:] = basis.mT @ tensor, 0.0
            if self.embedding is not None and self.table is not None:
                self.embedding.sub_(self.table)
                for tensor in _with_gradient(self.embedding):
                    found = self.subspace.coordinates(tensor)
                    tensor[:, :size], tensor[:, size:] = found, 0.0
        try:
            yield
        finally:
            self._restore(size)

    @torch.no_grad()
    def _restore(self, size: int) -> None:
        """Replace the coordinates of `in_coordinates` by the weights that they stand for."""
        for weight in self.writers:
            weight.copy_(self.subspace.of(weight) @ weight[:size])
        if self.embedding is not None and self.table is not None:
            self.embedding.copy_(self.subspace.restored(self.embedding[:, :size]) + self.table)

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Project the gradients of the parameters, in place: they do not depend on the cuts."""
        if self.subspace.whole:
            return
        for weight in self.writers:
            if weight.grad is not None:
                weight.grad.copy_(self.subspace.columns(weight.grad))
        if self.embedding is not None and self.embedding.grad is not None:
            self.embedding.grad.copy_(self.subspace.rows(self.embedding.grad))


def _with_gradient(parameter: nn.Parameter) -> list[Tensor]:
    return [parameter] if parameter.grad is None else [parameter, parameter.grad]


def residual_stream(model: nn.Module) -> ResidualStream:
    """Return what writes a model's residual stream.

    Raises:
        ConfigError: the model does not say, or it cannot be kept in a subspace.
    """
    declared = getattr(model, "residual_stream", None)
    if not callable(declared):
        raise _refused("it does not name what writes its residual stream", model)
    stream: ResidualStream = declared()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    embedding = parameters[f"{stream.embedding}.weight"]
    if any(p is embedding for name, p in parameters.items() if name != _weight(stream)):
        raise _refused("its output layer shares the embedding's weights", model)
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        raise _refused("dropout leaves the subspace", model)
    biases = [name for name in parameters if _writes(name.replace(".bias", ".weight"), stream)]
    if any(name.endswith(".bias") for name in biases):
        raise _refused("biases leave the subspace", model)
    return stream


@torch.no_grad()
def enlarge_table(model: nn.Module, size: int) -> None:
    """Scale what a new model's embedding has outside a subspace of `size` dimensions, in place.

    Needed on every member that starts from the model's initial values; the whole space stays as it
    is. Raises ConfigError as :func:`check_confined`.
    """
    weight = model.get_parameter(_weight(check_confined(model, size)))
    tokens, width = weight.shape
    if size == width or weight.is_meta:  # a rank's model without values gets them from the first
        return
    table = Subspace.drawn(width, size, seed=SEED).outside(weight)
    deviation = float(table.norm()) / math.sqrt(tokens * (width - size))
    if deviation > 0.0:
        weight.add_(table, alpha=TABLE_STD / deviation - 1.0)


def check_confined(model: nn.Module, size: int) -> ResidualStream:
    """Return what writes a model's residual stream, if it fits a subspace of `size` dimensions.

    Raises:
        ConfigError: it does not.
    """
    stream = residual_stream(model)
    width = model.get_parameter(_weight(stream)).shape[1]
    if not 1 <= size <= width:
        raise ConfigError(
            "a subspace that does not fit the model", given=f"subspace:{size}, width {width}",
            expected=f"1 to {width}", remedy=f"subspace:{max(1, width // 16)}",
        )  # fmt: skip
    return stream


def _refused(reason: str, model: nn.Module) -> ConfigError:
    return ConfigError(
        "the activations of this model cannot be confined to a subspace",
        given=f"{type(model).__name__}: {reason}",
        expected="an untied model without dropout that defines residual_stream()",
        remedy=f'{CAN}; or activations = "int8" in [island]',
    )


def _weight(stream: ResidualStream) -> str:
    return f"{stream.embedding}.weight"


def _writes(name: str, stream: ResidualStream) -> bool:
    return any(fnmatch(name, f"{pattern}.weight") for pattern in stream.writers)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, with the signs of Gram and Schmidt."""
    basis: Tensor
    basis, triangle = torch.linalg.qr(matrix)
    return basis * torch.sign(torch.diagonal(triangle))
