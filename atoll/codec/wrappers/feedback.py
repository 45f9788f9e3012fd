"""Error feedback: what a codec loses in one round is sent along in the next.

    m = x + e ;  send c = C(m) ;  e' = m - decode(c)

Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; analysed by Karimireddy et al. 2019,
"Error Feedback Fixes SignSGD" (https://arxiv.org/abs/1901.09847), Algorithm 1. Invariant: all
that was sent plus the residual e equals all that was given. For the codecs here `m - decode(c)`
is exact in float32, so only the sum `x + e` is ever rounded.

Differs from the paper: a round may be aborted. The new residual is provisional until
`finish(committed=True)`; `finish(committed=False)` forgets it, as if nothing had been sent, and
the caller sends the same x again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, check_vector
from atoll.errors import ConfigError

SHARED, INNER = "shared.", "inner."
"""Begin the names of state that is equal on all members, and of state of the codec inside."""


class Feedback:
    """Wraps a codec and keeps, per key, what it lost.

    Not for several threads at once.

    Args:
        inner: The codec whose loss is fed back.
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.spec = f"feedback({inner.spec})"
        self._residuals: dict[str, Tensor] = {}
        self._provisional: dict[str, Tensor] = {}
        self._spare: list[Tensor] = []
        """Vectors to write into: fresh ones of 40 MB cost 10 ms of page faults each."""

    @property
    def base(self) -> Codec:
        """What decodes the packets."""
        return self.inner.base

    @property
    def needs_allgather(self) -> bool:
        """Whether members add packets up themselves: as the inner codec."""
        return self.inner.needs_allgather

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Tell the inner codec the shapes."""
        self.inner.set_shapes(shapes)

    def set_round(self, round_: int) -> None:
        """Tell the inner codec the round."""
        self.inner.set_round(round_)

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet: the inner codec's."""
        return self.inner.nbytes(elements)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the inner codec's packet of `x` plus the residual of `key`.

        Called again for the same key before `finish`, it starts from the same residual.

        Raises:
            ConfigError: `x` is no float32 vector, or its size is not that of the residual.
        """
        x = check_vector(x, role="the input")
        residual = self._residuals.get(key)
        if residual is not None and residual.numel() != x.numel():
            raise ConfigError(
                f"the residual of {key!r} belongs to a vector of another size",
                given=f"{x.numel()} elements",
                expected=f"{residual.numel()} elements",
                remedy="use one key per vector, and resume with the same model",
            )
        total = self._memory(x.numel())
        if residual is None:
            total.copy_(x)
        else:
            torch.add(x, residual, out=total)
        packet = self.inner.encode(total, key=key)
        lost = self._provisional.pop(key, None)
        if lost is None or lost.numel() != x.numel():
            lost = self._memory(x.numel())
        self.inner.decode(packet, out=lost)
        torch.sub(total, lost, out=lost)
        self._provisional[key] = lost
        self._spare.append(total)
        return packet

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        return self.inner.decode(packet, out=out)

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        self.inner.decode_add(packet, out=out, weight=weight)

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return what encodes a mean: nothing is fed back there."""
        return self.inner.mean_codec(packet)

    def restore_mean(
        self,
        mean: Tensor,
        *,
        key: str,
        contributors: Sequence[str] = (),
        weight: float = 1.0,
        alone: bool = False,
    ) -> Tensor:
        """Return the mean as it is."""
        return mean

    def finish(self, *, committed: bool) -> None:
        """Keep the provisional residuals if the packets counted, forget them if not.

        A residual that is not finite (the vector was not) is forgotten in either case.
        """
        self.inner.finish(committed=committed)
        for key, lost in self._provisional.items():
            if committed and bool(torch.isfinite(lost).all()):
                old = self._residuals.get(key)
                self._residuals[key] = lost
                if old is not None:
                    self._spare.append(old)
            else:
                self._spare.append(lost)
        self._provisional.clear()
        del self._spare[2:]

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the residuals by key; provisional ones are not part of the state."""
        own = {key: residual.clone() for key, residual in self._residuals.items()}
        return own | inner_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up residuals; what was provisional is forgotten."""
        own = load_inner_state(self.inner, state)
        self._residuals = {
            key: check_vector(residual, role=f"the residual of {key!r}").clone()
            for key, residual in own.items()
        }
        self._provisional.clear()

    def _memory(self, elements: int) -> Tensor:
        """Return a vector to write into, an old one if one fits."""
        for index, vector in enumerate(self._spare):
            if vector.numel() == elements:
                return self._spare.pop(index)
        return torch.empty(elements)


def inner_state(inner: Codec) -> dict[str, Tensor]:
    """Return the state of a wrapped codec for that of its wrapper; `shared.*` keeps its name."""
    return {
        name if name.startswith(SHARED) else INNER + name: value
        for name, value in inner.state_dict().items()
    }


def load_inner_state(inner: Codec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give a wrapped codec its part of the wrapper's state, and return the rest."""
    names = [name for name in state if name.startswith((SHARED, INNER))]
    inner.load_state_dict({name.removeprefix(INNER): state[name] for name in names})
    return {name: value for name, value in state.items() if name not in names}
