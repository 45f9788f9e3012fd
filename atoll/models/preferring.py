"""Models that learn what people prefer, without a reward model.

Direct Preference Optimization (DPO), equation 7 (https://arxiv.org/abs/2305.18290), from two
answers to one prompt; Kahneman-Tversky Optimization (KTO), equation 8
(https://arxiv.org/abs/2402.01306), from single answers with a label, good or bad. The reference of
both papers is the base without its adapters, so no second model is in memory.

KTO differs from the paper:
  * the divergence from the base (z0) is the mean over the rows that are computed together, of
    each prompt with the answer to another one, which the data choose once; the paper shifts the
    answers within a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from atoll.models.adapted import IGNORED, Adapter, TunedLM, peft

UNMATCHED = 1 << 40
"""Targets of an answer to another prompt are below `IGNORED` by more than this."""

_ROWS_AT_ONCE = 4
"""Rows whose logits are in memory at once where no gradients are needed."""


class PreferringLM(TunedLM):
    """DPO: a model with adapters that takes rows of two answers each, to one prompt."""

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
        preferred answer, :func:`rejected` of one of the other, or `IGNORED`. The margin is how much
        more the model prefers the first answer to the second than the base does.
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


class JudgedLM(PreferringLM):
    """KTO: the same, of rows with an answer that has a label, and an answer to another prompt."""

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the rows of what an answer lacks of its full value, 0 to its weight.

        `outputs` are of :meth:`forward`; `targets` int64 ``(batch, length)``: tokens of a good
        answer, :func:`rejected` of a bad one; :func:`unmatched` of the other answer, or `IGNORED`.
        At the start it is half of the weight: the model is the base.
        """
        if outputs.shape[1:] != (2, targets.shape[1]):
            return super().criterion(outputs, targets)
        adapter = Adapter.of(self.config.adapter)
        gained = outputs[:, 0] - outputs[:, 1]
        other = targets < IGNORED - UNMATCHED
        drift = (gained * other).sum(1).mean().clamp(min=0).detach()
        reward = (gained * ((targets != IGNORED) & ~other)).sum(1)
        good = (targets >= 0).any(1)
        sign = torch.where(good, 1.0, -1.0).to(gained.dtype)
        weight = torch.where(good, adapter.desirable, adapter.undesirable).to(gained.dtype)
        return (weight * torch.sigmoid(-adapter.beta * sign * (reward - drift))).mean()


def unmatched(tokens: Tensor) -> Tensor:
    """Return targets of an answer to another prompt, with which KTO measures the divergence."""
    return IGNORED - 1 - UNMATCHED - tokens


def rejected(tokens: Tensor) -> Tensor:
    """Return targets of an answer that is not preferred: below `IGNORED`."""
    return IGNORED - 1 - tokens
