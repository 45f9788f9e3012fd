"""Error feedback: the loss of a codec in one round is added to the next.

  m = x + e ;  send c = C(m) ;  e' = m - decode(c)

Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; analysed by Karimireddy et al. 2019,
"Error Feedback Fixes SignSGD" (https://arxiv.org/abs/1901.09847), Algorithm 1. Invariant: the sum
of all vectors sent plus the residual e equals the sum of all inputs. For the codecs here
`m - decode(c)` is exact in float32, so only the sum `x + e` is ever rounded.

`feedback:0.95(...)` takes m = x + 0.95 e: what stays unsent for long fades, as in SparseLoCo (Sarfi
et al. 2025, https://arxiv.org/abs/2508.15706) and MuLoCo. What fades is in no sum any more.

Differs from the paper: a round may be aborted. The new residual is provisional until
`finish(committed=True)`; `finish(committed=False)` drops it, as if nothing had been sent, and the
caller sends the same x again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, check_vector
from atoll.codec.registry import make_codec, row_of
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.auto import AUTO, FED_BACK, Auto
from atoll.codec.wrappers.wrapper import Wrapper, check_size, inner_state, load_inner_state
from atoll.errors import ConfigError


class Feedback(Wrapper):
    """Wraps a codec and keeps its loss per key. Not thread-safe.

    Raises:
        ConfigError: `decay` (share of the residual that is added again) is not above 0 and at most
            1.
    """

    def __init__(self, inner: Codec, *, decay: float = 1.0) -> None:
        super().__init__([inner])
        if not 0.0 < decay <= 1.0:
            raise ConfigError(
                "the decay of error feedback is out of range", given=decay,
                expected="above 0 and at most 1", remedy=f"feedback:0.95({inner.spec})",
            )  # fmt: skip
        self.inner, self._decay = inner, float(f"{decay:g}")
        self.spec = f"feedback({inner.spec})" if decay == 1 else f"feedback:{decay:g}({inner.spec})"
        self._residuals: dict[str, Tensor] = {}
        self._provisional: dict[str, Tensor] = {}
        self._spare: list[Tensor] = []
        """Vectors for reuse: new ones of 40 MB cost 10 ms of page faults each."""

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `feedback(codec)` or `feedback:decay(codec)`."""
        arguments.at_most(1)
        decay = arguments.share() if arguments.values else 1.0
        return cls(fed_back(replace(arguments, values=()), inner), decay=decay)

    @property
    def base(self) -> Codec:
        """The codec that decodes the packets."""
        return self.inner.base

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the inner codec's packet of `x` plus the residual of `key`.

        Repeated for the same key before `finish`, it starts from the same residual.

        Raises:
            ConfigError: `x` is not a float32 vector of the size of the residual.
        """
        x = check_vector(x, role="the input")
        residual = self._residuals.get(key)
        if residual is not None:
            check_size(residual, x, what=f"the residual of {key!r}")
        total = self._memory(x.numel())
        if residual is None:
            total.copy_(x)
        else:
            torch.add(x, residual, alpha=self._decay, out=total)
        packet = self.inner.encode(total, key=key)
        lost = self._provisional.pop(key, None)
        if lost is None or lost.numel() != x.numel():
            lost = self._memory(x.numel())
        self.inner.decode(packet, out=lost)
        torch.sub(total, lost, out=lost)
        self._provisional[key] = lost
        self._spare.append(total)
        return packet

    def finish(self, *, committed: bool) -> None:
        """Keep the provisional residuals if the round was committed, else drop them.

        Non-finite residuals (of non-finite vectors) are always dropped.
        """
        super().finish(committed=committed)
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
        """Return a copy of the residuals by key, without provisional ones."""
        own = {key: residual.clone() for key, residual in self._residuals.items()}
        return own | inner_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load residuals; provisional ones are dropped."""
        own = load_inner_state(self.inner, state)
        self._residuals = {
            key: check_vector(residual, role=f"the residual of {key!r}").clone()
            for key, residual in own.items()
        }
        self._provisional.clear()

    def _memory(self, elements: int) -> Tensor:
        for index, vector in enumerate(self._spare):
            if vector.numel() == elements:
                return self._spare.pop(index)
        return torch.empty(elements)


def fed_back(arguments: Arguments, inner: Sequence[Codec]) -> Codec:
    """Return the one codec inside a feedback wrapper.

    Raises:
        ConfigError: there is not exactly one, it is itself a wrapper, or it is unbiased.
    """
    arguments.at_most(0)
    if not inner:
        raise ConfigError(
            f"{arguments.name} wraps another codec",
            given=repr(arguments.spec), expected=f"e.g. {arguments.example}",
        )  # fmt: skip
    codec = inner[0]
    if len(inner) != 1 or (codec.base is not codec and not isinstance(codec, Auto)):
        raise ConfigError(
            f"{arguments.name} cannot wrap several codecs" if len(inner) != 1
            else f"{arguments.name} cannot wrap a codec that is wrapped already",
            given=repr(arguments.spec), expected=f"one plain codec, e.g. {arguments.example}",
        )  # fmt: skip
    if isinstance(codec, Auto):
        plain = codec.parts if codec.spec != AUTO else [make_codec(spec) for spec in FED_BACK]
        found = Auto([fed_back(arguments, [one]) for one in plain], spec=codec.spec)
        found.choice = codec.choice  # `plain` begins with the same codecs
        return found
    row = row_of(codec)
    if row is not None and row.unbiased:
        raise ConfigError(
            f"{arguments.name} around a codec that is unbiased does harm: its noise averages out, "
            "and the residual can exceed the error that it corrects",
            given=repr(arguments.spec), expected=f"{codec.spec} alone, or {arguments.example}",
        )  # fmt: skip
    return codec.plain()
