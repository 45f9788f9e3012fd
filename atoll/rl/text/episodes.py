"""What a language model wrote between two updates: prompts, completions, and what they earned.

A batch has B completions. Positions of tokens run from 0 to L - 1 over prompt and completion; what
follows the end of a completion is filled with zeros and never counted. A "step" is one written
token: step t of a completion is the token at position `prompts[b] + t`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import DataError


@dataclass(slots=True)
class Episodes:
    """B completions of one policy, with the same header as a trajectory of an environment."""

    policy: str
    """Whose they are."""
    tokens: Tensor
    """[B, L], int64: prompt, completion, zeros."""
    prompts: Tensor
    """[B], int64: tokens of each prompt, 1 or more."""
    lengths: Tensor
    """[B], int64: tokens of each completion, the end included; 1 or more."""
    log_probabilities: Tensor
    """[B, T], float32: of the written tokens, under the policy that wrote them; zeros after."""
    rewards: Tensor
    """[B, T], float32: per written token, the penalty for leaving the reference included."""
    scores: Tensor
    """[B], float32: what the task gave."""
    sequence: int = 0
    """Counts the batches of one actor, from 1."""
    actor: str = ""
    """Who wrote them, e.g. `w1`."""
    policy_version: int = 0
    """Updates of the policy that wrote."""
    value_version: int = 0
    """Updates of the value model that the actor used."""

    @property
    def steps(self) -> int:
        """Completions in it; `steps` of [rl] counts these."""
        return len(self.tokens)

    @property
    def mask(self) -> Tensor:
        """[B, T], bool: which steps were written."""
        return torch.arange(self.log_probabilities.shape[1]) < self.lengths[:, None]

    @property
    def places(self) -> Tensor:
        """[B, T], int64: position before each step, whose output chose it; inside [0, L - 1]."""
        steps = torch.arange(self.log_probabilities.shape[1])
        return (self.prompts[:, None] - 1 + steps).clamp(max=self.tokens.shape[1] - 1)

    @property
    def written(self) -> Tensor:
        """[B, T], int64: the token of each step, zeros after the end."""
        following = (self.places + 1).clamp(max=self.tokens.shape[1] - 1)
        return self.tokens.gather(1, following) * self.mask

    def check(self) -> Episodes:
        """Return itself if its parts fit together and every number is finite.

        Raises:
            DataError: they do not; the policy and the completion are named.
        """
        count, length = self.tokens.shape
        steps = self.log_probabilities.shape[1]
        fits = (
            self.prompts.shape == self.lengths.shape == self.scores.shape == (count,)
            and self.log_probabilities.shape == self.rewards.shape == (count, steps)
            and count > 0
            and int(self.prompts.min()) >= 1
            and int(self.lengths.min()) >= 1
            and int(self.lengths.max()) <= steps
            and int((self.prompts + self.lengths).max()) <= length
            and int(self.tokens.min()) >= 0
        )
        if not fits:
            raise DataError(
                "completions do not fit together",
                given=f"{self._name}: {count} of {length} tokens",
                expected="as many lengths, rewards and log-probabilities as there are texts",
            )  # fmt: skip
        for name in ("log_probabilities", "rewards", "scores"):
            wrong = (~torch.isfinite(getattr(self, name))).nonzero()
            if len(wrong):
                raise DataError(
                    f"completions have {name} that are not finite",
                    given=f"{self._name}, completion {int(wrong[0, 0])}",
                    expected="finite numbers",
                    remedy="look at the task's reward; the batch was dropped",
                )
        return self

    @property
    def _name(self) -> str:
        return f"policy {self.policy}, actor {self.actor or '?'}, batch {self.sequence}"
