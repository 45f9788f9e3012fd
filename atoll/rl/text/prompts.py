"""Prompts as token ids, and completions as text."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.data import Tokenizer
from atoll.errors import ConfigError
from atoll.rl.text.tasks import TextTask

END = b"\n"
"""Ends a completion; not allowed in prompts."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A batch of prompts."""

    texts: list[str]
    tokens: Tensor
    """[B, P], int64, padded with zeros."""
    lengths: Tensor
    """[B], int64."""


class Wording:
    """Turns texts into tokens and back."""

    def __init__(self, tokenizer: Tokenizer, *, size: int = 0) -> None:
        """Use a tokenizer; `size` is the model's vocabulary if that is larger."""
        self.tokenizer = tokenizer
        ids = torch.arange(tokenizer.vocab_size)
        ends = torch.tensor([END in tokenizer.decode(ids[i : i + 1]) for i in ids.tolist()])
        self.ends = torch.nn.functional.pad(ends, (0, max(0, size - len(ends))))
        """[vocab], bool: tokens that end a completion."""

    def draw(
        self, task: TextTask, count: int, *, repeats: int, source: random.Random, room: int
    ) -> Prompts:
        """Return prompts of a task.

        Each follows itself `repeats` times, and has at most `room` tokens.

        Raises:
            ConfigError: a prompt is empty, has a line break, or has more tokens.
        """
        texts = [task.prompt(source) for _ in range(count)]
        return self.encode([text for text in texts for _ in range(repeats)], room=room)

    def encode(self, texts: list[str], *, room: int) -> Prompts:
        """Return texts as prompts; see `draw`."""
        ids = [self.tokenizer.encode(text.encode("utf-8")).long() for text in texts]
        for text, one in zip(texts, ids, strict=True):
            if not 1 <= len(one) <= room or END.decode() in text:
                raise ConfigError(
                    "a prompt cannot be completed",
                    given=f"{text[:60]!r}, {len(one)} tokens",
                    expected=f"one line of 1 to {room} tokens: the model's context less max_tokens",
                    remedy="shorter prompts, fewer max_tokens, or a larger context in [model]",
                )
        return Prompts(texts, padded(ids), torch.tensor([len(one) for one in ids]))

    def read(self, tokens: Tensor) -> str | None:
        """Return a completion's text up to its end; None if it has no end."""
        text, end, _ = self.tokenizer.decode(tokens).partition(END)
        return text.decode("utf-8", errors="replace") if end else None


def padded(rows: list[Tensor]) -> Tensor:
    """Return rows of ids as one tensor, padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
