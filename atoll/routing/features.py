"""Features of texts: the mean hidden state of a small language model (arXiv 2403.10616, 2.4).

A router sees these features and nothing else, so what is given to `features` is all that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data import Documents, Tokenizer
from atoll.errors import ConfigError, DataError
from atoll.models.language import LanguageModel, LayeredLanguageModel, evaluating

Features = NDArray[np.float32]

PREFIX = 32
"""Tokens of a document that choose its path, as in the paper."""

BATCH = 64


@dataclass(frozen=True)
class FeatureModel:
    """A small language model and its tokenizer, and how much of a text it reads.

    Attributes:
        model: Made of units, the last of which is the output layer.
        tokenizer: The model's own; texts of another tokenizer are encoded again.
        prefix: First tokens of a document that choose its path, in the data's tokenizer.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    prefix: int = PREFIX
    _described: dict[int, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raise ConfigError if the model has no units or cannot read the prefix."""
        if not isinstance(self.model, LayeredLanguageModel):
            raise ConfigError(
                "features need the hidden states of a model that is made of units",
                given=type(self.model).__name__,
                expected="gpt, gpt2, llama, or a family of transformers that pipelines can cut",
            )
        if not 1 <= self.prefix <= self.longest:
            raise ConfigError(
                "the prefix that chooses a path does not fit the small model",
                given=f"{self.prefix} tokens",
                expected=f"1 to {self.longest}, the model's context",
            )

    @property
    def longest(self) -> int:
        """The longest text that it can read, in tokens."""
        return self.model.config.context

    def features(self, texts: Sequence[Tensor], tokenizer: Tokenizer) -> Features:
        """Return the mean hidden state of whole texts, float32 ``(texts, width)``.

        Args:
            texts: Token ids, 1-D each, of 1 token to the model's context.
            tokenizer: That of the ids.

        Raises:
            DataError: a text is empty or too long.
        """
        for text in texts:
            if not 1 <= len(text) <= self.longest:
                raise DataError(
                    "a text has no features", given=f"{len(text)} tokens",
                    expected=f"1 to {self.longest}",
                )  # fmt: skip
        own = self._own(texts, tokenizer)
        parts = [self._of_batch(own[start : start + BATCH]) for start in range(0, len(own), BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, 0), dtype=np.float32)

    def prefixes(
        self, documents: Documents, chosen: Sequence[int], tokenizer: Tokenizer
    ) -> Features:
        """Return the features of some documents' first `prefix` tokens.

        Shorter documents use what they have.
        """
        return self.features([ids[: self.prefix] for ids in documents.chosen(chosen)], tokenizer)

    def _own(self, texts: Sequence[Tensor], tokenizer: Tokenizer) -> list[Tensor]:
        """Return the texts in this model's tokens."""
        if self._same(tokenizer):
            return [text.long() for text in texts]
        again = [
            self.tokenizer.encode(tokenizer.decode(text))[-self.longest :].long() for text in texts
        ]
        # A tokenizer that drops what it does not know can leave nothing of a text.
        return [text if len(text) else torch.zeros(1, dtype=torch.int64) for text in again]

    def _same(self, tokenizer: Tokenizer) -> bool:
        if tokenizer is self.tokenizer:
            return True
        return self._json(tokenizer) == self._json(self.tokenizer)

    def _json(self, tokenizer: Tokenizer) -> str:
        found = self._described.get(id(tokenizer))
        if found is None:
            found = self._described[id(tokenizer)] = tokenizer.to_json()
        return found

    @torch.no_grad()
    def _of_batch(self, texts: Sequence[Tensor]) -> Features:
        # Padding on the right changes nothing before it: the model is causal.
        longest = max(len(text) for text in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        lengths = torch.tensor([len(text) for text in texts])
        device = next(self.model.parameters()).device
        hidden = hidden_states(self.model, ids.to(device)).float().cpu()
        real = torch.arange(longest) < lengths[:, None]
        mean: Tensor = (hidden * real[..., None]).sum(1) / lengths[:, None]
        return mean.numpy()


def hidden_states(model: LanguageModel, ids: Tensor) -> Tensor:
    """Return the input of the output layer, ``(batch, length, width)``; the model is unchanged."""
    x = ids
    assert isinstance(model, LayeredLanguageModel)
    with evaluating(model):
        for unit in model.units()[:-1]:
            x = unit(x)
    return x
