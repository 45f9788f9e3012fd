"""The chance in a rollout: drawn for all its steps at once, and judged for all at once.

A policy's network has to run step by step, because the next observation depends on the action. The
random numbers and the probabilities have not, and they cost as much as the network does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.rl.distributions import distribution, outputs
from atoll.rl.spaces import CONTINUOUS, MULTI_DISCRETE, Actions


class ActionSampler:
    """ActionSampler the actions of T steps in B columns.

    Args:
        actions: The space.
        log_deviation: [d], of a continuous space; None otherwise.
        length: T.
        columns: B.
        generator: Of the noise.
    """

    def __init__(
        self, actions: Actions, log_deviation: Tensor | None, *, length: int, columns: int,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self._actions, self._log_deviation = actions, log_deviation
        self.outputs = torch.empty(length, columns, outputs(actions))
        """What the policy's network puts out, [T, B, outputs]; filled by `choose`."""
        noise = torch.empty_like(self.outputs)
        if actions.kind == CONTINUOUS:
            assert log_deviation is not None
            noise.normal_(generator=generator).mul_(log_deviation.detach().exp())
        else:
            # The largest of logits with Gumbel noise, -ln of Exp(1), is a draw from their softmax.
            noise.exponential_(generator=generator).log_().neg_()
        self._noise, self._kept = noise.unbind(0), self.outputs.unbind(0)

    def choose(self, step: int, output: Tensor) -> Tensor:
        """Return the actions [B, width] of a step.

        Args:
            step: Which of the T.
            output: [B, outputs], of the policy's network.
        """
        self._kept[step].copy_(output)
        noisy = output + self._noise[step]
        if self._actions.kind == CONTINUOUS:
            return noisy
        if self._actions.kind == MULTI_DISCRETE:
            parts = torch.split(noisy, list(self._actions.sizes), dim=-1)
            return torch.stack([part.argmax(-1) for part in parts], dim=-1)
        return noisy.argmax(-1, keepdim=True)

    @torch.no_grad()
    def log_probabilities(self, actions: Tensor) -> Tensor:
        """Return ln p of all the actions [T, B, width] that were chosen, [T, B]."""
        chances = distribution(self._actions, self.outputs, self._log_deviation)
        return chances.log_probability(actions)
