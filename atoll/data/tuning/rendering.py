"""Conversations as token ids, with a mask of what is trained.

The chat is rendered with the model's template. A template need not mark what the model says, so an
answer's place is found by rendering the messages before it, with the prompt for an answer, and
those up to it: the answer is what the second text adds to the first. Where a template rewrites
earlier turns (e.g. drops their reasoning), these are not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.tuning.conversations import Conversation, Message
from atoll.errors import ConfigError, DataError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of that name."""

_PIECE_CHARS = 1 << 16
"""A plain text is encoded in pieces of so many characters: the library is slow on long ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """Ids of one example, int32 ``(length,)``, and whether each is trained, bool ``(length,)``."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    rewritten: int = 0
    """Answers that the template rewrites later, which are not trained on."""


class Renderer:
    """Renders conversations with a tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any, *, template: str, completion_only: bool) -> None:
        """Use a tokenizer with its own template, or with `template` (Jinja, or `chatml`)."""
        self._tokenizer, self._completion_only = tokenizer, completion_only
        self._template = CHATML if template == "chatml" else template
        end = tokenizer.eos_token_id
        self._end = [] if end is None else [int(end)]

    def render(self, conversation: Conversation, *, last: bool = False) -> Rendered:
        """Return an example's ids; `last`: of a chat only the last answer is trained on.

        Raises:
            ConfigError: the model has no chat template.
            DataError: the template refuses the messages.
        """
        if conversation.messages:
            return self._chat(conversation.messages, last=last)
        prompt, completion = self._plain(conversation.prompt), self._plain(conversation.completion)
        ids = np.array([*prompt, *completion, *self._end], dtype=np.int32)
        trained = np.ones(len(ids), dtype=bool)
        if self._completion_only:
            trained[: len(prompt)] = False
        return Rendered(ids, trained)

    def _plain(self, text: str) -> list[int]:
        parts = [text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS)]
        return [
            one
            for part in parts
            for one in self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        ]

    def _chat(self, messages: Sequence[Message], *, last: bool) -> Rendered:
        text = self._text(messages)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        if not self._completion_only:
            return Rendered(ids, np.ones(len(ids), dtype=bool))
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        trained, rewritten = np.zeros(len(ids), dtype=bool), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or (last and number < len(messages) - 1):
                continue
            before = self._text(messages[:number], prompt=True)
            until = self._text(messages[: number + 1])
            if not (until.startswith(before) and text.startswith(until)):
                rewritten += 1
                continue
            trained |= (starts >= len(before)) & (starts < len(until))
        return Rendered(ids, trained, rewritten)

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        if not messages:
            return ""
        template = self._template or self._tokenizer.chat_template
        if not template:
            raise ConfigError(
                "this model has no chat template", given="examples with messages",
                expected="a model that was trained on chats, or a template",
                remedy='template = "chatml" in [tune] (atoll tune --template chatml), or a file '
                "with a Jinja template",
            )  # fmt: skip
        from jinja2 import TemplateError  # comes with transformers' chat templates

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt,
                chat_template=template,
            )  # fmt: skip
        except TemplateError as error:
            raise DataError(
                "the chat template refuses a conversation",
                given=f"{[message['role'] for message in messages]}: {error}",
                expected="roles in the order that the model knows",
                remedy="change the data, or give another template",
            ) from error
        return text
