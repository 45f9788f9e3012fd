"""Base classes of language models: loss and text generation.

Shapes: `batch` sequences, `length` tokens (at most ``context``), `width` features, `vocab` tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.errors import ConfigError


class HasContext(Protocol):
    """The options of a language model."""

    @property
    def context(self) -> int:
        """Maximum sequence length in tokens."""
        ...


class LanguageModel(nn.Module):
    """A model that predicts the next token at every position of a sequence.

    Called with int64 token ids ``(batch, length)`` it returns logits ``(batch, length, vocab)``.
    """

    config: HasContext

    def check_length(self, length: int) -> None:
        """Check a sequence length; raises ConfigError if it exceeds the context."""
        if length > self.config.context:
            raise ConfigError(
                "sequences longer than the model's context",
                given=f"{length} tokens",
                expected=f"at most {self.config.context}",
                remedy=f"cut them, or build the model with context={length}",
            )

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ``(batch, length, vocab)``, in nats per token."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token, a scalar; inputs ``(batch, length)``."""
        return self.criterion(self(ids), targets)

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the prompt followed by sampled tokens, int64 ``(batch, length + tokens)``.

        Args:
            prompt_ids: ``(batch, length)``, at least one token; only the last ``context`` are used.
            tokens: Number of tokens to add.
            temperature: 0 takes the most likely token; below 1 sharpens, above 1 flattens.
            top_k: Sample among this many most likely tokens only.
            generator: Source of randomness, on any device; one in main memory draws the same
                tokens wherever the model is.

        Raises:
            ConfigError: the prompt is empty, or a number is negative.
        """
        check_writing(prompt_ids, tokens=tokens, temperature=temperature, top_k=top_k)
        ids = prompt_ids
        with evaluating(self):
            for _ in range(tokens):
                logits = self(ids[:, -self.config.context :])[:, -1]
                ids = torch.cat((ids, sampled(logits, temperature, top_k, generator)), dim=1)
        return ids

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())


class LayeredLanguageModel(LanguageModel):
    """A language model that is a chain of its units."""

    @abstractmethod
    def units(self) -> Sequence[nn.Module]:
        """Return the layers in forward order; chaining them gives the whole model."""

    @abstractmethod
    def tensor_plan(self) -> Mapping[str, str]:
        """Return the tensor-parallel plan; see `Trainable`."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(batch, length, vocab)``; raises ConfigError for too long sequences."""
        self.check_length(ids.shape[1])
        x = ids
        for unit in self.units():
            x = unit(x)
        return x


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into its mode at the end, after errors too."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_writing(
    prompt_ids: Tensor, *, tokens: int, temperature: float, top_k: int | None
) -> None:
    """Check the arguments of `generate`; raises ConfigError."""
    if prompt_ids.dim() != 2 or prompt_ids.shape[1] < 1:
        raise ConfigError(
            "nothing to continue",
            given=f"a prompt of shape {tuple(prompt_ids.shape)}",
            expected="(batch, length) with length of 1 or more",
        )
    if temperature < 0 or tokens < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(
            "cannot generate with these settings",
            given=f"tokens={tokens}, temperature={temperature}, top_k={top_k}",
            expected="tokens and temperature of 0 or more, top_k of 1 or more",
        )


def sampled(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token id per row of ``(batch, vocab)`` logits, ``(batch, 1)``."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept, _ = logits.topk(top_k)
        logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
    chances = logits.softmax(dim=-1)
    drawn_on = chances.device if generator is None else generator.device
    return torch.multinomial(chances.to(drawn_on), 1, generator=generator).to(logits.device)
