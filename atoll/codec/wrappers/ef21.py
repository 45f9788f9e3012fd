"""EF21: members send changes of their vectors, and all members keep the sum.

  send c_i = C(x_i - s_i) ;  s_i' = s_i + c_i ;  s' = s + mean(c_i)

s_i is a member's own; s, the mean of all s_i, is equal on all. When x_i converges, s_i converges to
x_i and s to the mean of all x_i, however coarse C is, as long as its error is shorter than the
vector. The result of a round is s', not the decoded mean: `restore_mean` returns it.

The sum is correct only while the same members contribute with the same weights. A joining member
starts with s_i = s; after any change of the contributors or of their total weight all members do,
which makes `mean(s_i) = s` true again. Their differences are then sent again.

Richtárik, Sokolov and Fatkhullin 2021, Algorithm 2 (https://arxiv.org/abs/2106.05203). Differs from
the paper: s_0 = 0, not C(x_i); a round may be aborted; members join and leave.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet, check_vector
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.feedback import fed_back
from atoll.codec.wrappers.wrapper import (
    INNER,
    SHARED,
    Wrapper,
    check_size,
    inner_state,
    load_inner_state,
)
from atoll.errors import ConfigError


class EF21(Wrapper):
    """Sends changes with the inner codec. Not thread-safe."""

    def __init__(self, inner: Codec) -> None:
        super().__init__([inner])
        self.inner = inner
        self.spec = f"ef21({inner.spec})"
        self._own: dict[str, Tensor] = {}
        """s_i by key, if different from s."""
        self._common: dict[str, Tensor] = {}
        """s by key."""
        self._marks: dict[str, int] = {}
        """Hash of the contributors and weight of the last mean, by key."""
        self._provisional: dict[str, Tensor] = {}
        self._counted: dict[str, Tensor | None] = {}
        """c_i of a committed round before `restore_mean`; None: it was left out."""

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `ef21(codec)`."""
        return cls(fed_back(arguments, inner))

    @property
    def base(self) -> Codec:
        """The codec that decodes the packets."""
        return self.inner.base

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the inner codec's packet of the change of `x` since the last one.

        Raises:
            ConfigError: `x` is not a float32 vector of the same size as before, or the strategy
                does not call `restore_mean`.
        """
        x = check_vector(x, role="the input")
        if key in self._counted:
            raise ConfigError(
                "ef21 sends differences, but this strategy uses their mean as the whole vector",
                given=f"no `restore_mean` after the committed round of {key!r}",
                expected="a strategy that calls Codec.restore_mean",
                remedy=f"feedback({self.inner.spec})",
            )
        sent = self._own.get(key, self._common.get(key))
        if sent is not None:
            check_size(sent, x, what=f"what was sent of {key!r}")
        packet = self.inner.encode(x if sent is None else x - sent, key=key)
        self._provisional[key] = self.inner.decode(packet)
        return packet

    def finish(self, *, committed: bool) -> None:
        """Keep the sent changes if they were committed, else drop them."""
        super().finish(committed=committed)
        for key, sent in self._provisional.items():
            if committed:
                self._counted[key] = sent if bool(torch.isfinite(sent).all()) else None
        self._provisional.clear()

    def restore_mean(
        self,
        mean: Tensor,
        *,
        key: str,
        contributors: Sequence[str] = (),
        weight: float = 1.0,
        alone: bool = False,
    ) -> Tensor:
        """Return the sum of all means so far, a new vector; see :meth:`Codec.restore_mean`."""
        counted = self._counted.pop(key, None)
        if alone:
            self._common[key] = mean.clone()
            self._own.pop(key, None)
            self._marks.pop(key, None)
            return mean
        mark = zlib.crc32("\0".join([*contributors, weight.hex()]).encode())
        before = self._common.get(key)
        whole = mean.clone() if before is None else before + mean
        steady = before is None or self._marks.get(key) == mark
        if steady and counted is not None:
            own = self._own.get(key, before)
            self._own[key] = counted if own is None else own + counted
        else:
            self._own.pop(key, None)
        self._common[key], self._marks[key] = whole, mark
        return whole.clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Return s_i by key, and s as `shared.ef21.*`, which is equal on all members."""
        own = {f"own.{key}": value.clone() for key, value in self._own.items()}
        common = {f"{_COMMON}{key}": value.clone() for key, value in self._common.items()}
        marks = {f"{_MARK}{key}": torch.tensor([mark]) for key, mark in self._marks.items()}
        return own | common | marks | inner_state(self.inner)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member has only the shared part."""
        mine = {k: v for k, v in state.items() if k.startswith((_COMMON, _MARK, "own."))}
        rest = {k: v for k, v in state.items() if k not in mine}
        unknown = load_inner_state(self.inner, rest)
        if unknown:
            raise ConfigError(
                "this state is of another codec", given=", ".join(sorted(unknown)),
                expected="own.*, shared.ef21.* or " + INNER + "*",
                remedy="resume with the codec the checkpoint was written with",
            )  # fmt: skip
        self._own = _vectors(mine, "own.")
        self._common = _vectors(mine, _COMMON)
        self._marks = {
            k.removeprefix(_MARK): int(v) for k, v in mine.items() if k.startswith(_MARK)
        }
        self._provisional.clear()
        self._counted.clear()


_COMMON, _MARK = f"{SHARED}ef21.sum.", f"{SHARED}ef21.mark."


def _vectors(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return copies of the vectors under a prefix, by key."""
    return {
        name.removeprefix(prefix): check_vector(value, role=f"the state {name!r}").clone()
        for name, value in state.items()
        if name.startswith(prefix)
    }
