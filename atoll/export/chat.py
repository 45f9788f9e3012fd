"""A conversation with a trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.export.opened import Opened
from atoll.models.pretrained import library


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How answers are sampled."""

    tokens: int = 400
    """At most so many per answer."""
    temperature: float = 0.7
    """0: always the most likely token."""
    seed: int = 0
    system: str = ""
    """First message of the conversation."""


@dataclass(slots=True)
class Chat:
    """A model, and the messages so far; `answer` adds two."""

    model: Any
    tokenizer: Any
    manner: Manner
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.manner.seed)
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation."""
        system = self.manner.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, said: str, *, write: Callable[[str], None] = lambda text: None) -> str:
        """Return the model's answer; `write` gets its parts as soon as they are there.

        Raises:
            ConfigError: the conversation is longer than the model can read.
        """
        messages = [*self.messages, {"role": "user", "content": said}]
        ids = self._ids(messages)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and ids.shape[1] >= longest:
            raise ConfigError(
                "the conversation is too long for this model", given=f"{ids.shape[1]} tokens",
                expected=f"fewer than {longest}", remedy="begin a new one: /new",
            )  # fmt: skip
        text = self._generate(ids, longest or ids.shape[1] + self.manner.tokens, write)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text

    def _ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Return a conversation up to the answer, int64 ``(1, length)``.

        A model without a chat template gets the last message as it is, to continue it.
        """
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        else:
            text = messages[-1]["content"]
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([found], dtype=torch.int64, device=self.model.device)

    def _generate(self, ids: torch.Tensor, longest: int, write: Callable[[str], None]) -> str:
        sampling: dict[str, Any] = {"do_sample": False}
        if self.manner.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.manner.temperature, "top_k": 0}
        end = self.tokenizer.eos_token_id
        settings = library().GenerationConfig(
            max_new_tokens=min(self.manner.tokens, longest - ids.shape[1]), use_cache=True,
            eos_token_id=end, pad_token_id=end, **sampling,
        )  # fmt: skip
        with torch.no_grad():
            written = self.model.generate(
                ids, generation_config=settings, attention_mask=torch.ones_like(ids),
                streamer=_streamer(self.tokenizer, write),
            )  # fmt: skip
        text: str = self.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        return text


def open_chat(opened: Opened, *, manner: Manner, device: torch.device) -> Chat:
    """Return a conversation that has not begun.

    Raises:
        ConfigError: the run's tokenizer cannot be expressed by the library.
    """
    if opened.tokenizer is None:
        raise ConfigError(
            "there is no conversation with this model", given="a vocabulary of Atoll's own",
            expected="a model of transformers, or one of bytes", remedy="atoll generate RUN",
        )  # fmt: skip
    return Chat(opened.whole().to(device), opened.tokenizer, manner)


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """Return a streamer for the library's new tokens; it holds back incomplete characters."""

    class Parts(library().TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Parts(tokenizer, skip_prompt=True, skip_special_tokens=True)
