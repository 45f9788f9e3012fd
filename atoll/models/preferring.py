"""A model that learns which of two answers people prefer, without a reward model.

Direct Preference Optimization, equation 7 (https://arxiv.org/abs/2305.18290). The reference of the
paper is the base without its adapters, so no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.models.adapted import IGNORED, Adapter, TunedLM, peft

_ROWS_AT_ONCE = 4
"""Rows whose logits are in memory at once where no gradients are needed."""


class PreferringLM(TunedLM):
    """A model with adapters that takes rows of two answers each, to one prompt."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return log-probabilities of following tokens, or logits as :class:`TunedLM` does.

        `ids` are int64 ``(batch, 3, length)``: ids, positions and the following tokens; then the
        result is ``(batch, 2, length)``: by the model, and by the base without adapters.
        """
        if ids.dim() == 2 or ids.shape[1] < 3:
            return super().forward(ids)
        self.check_length(ids.shape[2])
        with torch.no_grad(), self._without_adapters():
            reference = self._in_parts(ids)
        own = self._following(ids) if torch.is_grad_enabled() else self._in_parts(ids)
        return torch.stack([own, reference], dim=1)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of -ln sigmoid(beta times the margin) over the rows, in nats.

        `outputs` are of :meth:`forward`; `targets` int64 ``(batch, length)``: the token of the
        preferred answer, :func:`rejected` of one of the other, or `IGNORED`. The margin is by how
        much more the model prefers the first to the second than the base does.
        """
        if outputs.shape[1:] != (2, targets.shape[1]):
            return super().criterion(outputs, targets)
        gained = outputs[:, 0] - outputs[:, 1]
        sign = (targets >= 0).to(gained.dtype) - (targets < IGNORED).to(gained.dtype)
        margin = (gained * sign).sum(1)
        beta = Adapter.of(self.config.adapter).beta
        return -functional.logsigmoid(beta * margin).mean()

    def _in_parts(self, ids: Tensor) -> Tensor:
        return torch.cat([self._following(part) for part in torch.split(ids, _ROWS_AT_ONCE)])

    def _following(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of the following tokens, ``(batch, length)``."""
        found = self._theirs[0](input_ids=ids[:, 0], position_ids=ids[:, 1], use_cache=False)
        logits = cast(Tensor, found.logits).flatten(0, 1).float()
        said = functional.cross_entropy(logits, ids[:, 2].flatten(), reduction="none")
        return -said.view(ids.shape[0], ids.shape[2])

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        kind = peft().tuners.tuners_utils.BaseTunerLayer
        layers: list[Any] = [layer for layer in self.modules() if isinstance(layer, kind)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def rejected(tokens: Tensor) -> Tensor:
    """Return targets of the answer that is not preferred: below `IGNORED`."""
    return IGNORED - 1 - tokens
