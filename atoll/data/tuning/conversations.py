"""Records as conversations, from the usual sets of columns.

messages, conversations    a list of {role, content}, or of ShareGPT's {from, value}
prompt, completion         two texts, or two lists of messages
instruction, input, output Alpaca's columns; `input` may be empty or missing
question, answer           two texts
text                       plain text, all of which is trained on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import DataError

Message = dict[str, str]

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip

COLUMNS = (
    "messages", "conversations", "prompt and completion", "instruction and output",
    "question and answer", "text",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example: messages, or a prompt and its continuation as plain text."""

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    """Of a plain text all of it; the prompt is empty then."""


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation in a record.

    Raises:
        DataError: it has none of the known columns, or a value of a wrong type.
    """
    for name in ("messages", "conversations"):
        if record.get(name):
            return Conversation(messages=_messages(record[name], name))
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Conversation(prompt=prompt, completion=completion)
        both = [*_messages(prompt, "prompt"), *_messages(completion, "completion")]
        return Conversation(messages=tuple(both))
    for question, more, answer in (("instruction", "input", "output"), ("question", "", "answer")):
        if record.get(question) and record.get(answer) is not None:
            request = _text(record[question], question)
            if more and record.get(more):  # a table may have a column without a name
                request += "\n\n" + _text(record[more], more)
            return Conversation(
                messages=(
                    {"role": "user", "content": request},
                    {"role": "assistant", "content": _text(record[answer], answer)},
                )
            )
    if isinstance(record.get("text"), str):
        return Conversation(completion=record["text"])
    raise DataError(
        "a record has no known columns", given=", ".join(map(str, record)) or "nothing",
        expected="; or ".join(COLUMNS),
    )  # fmt: skip


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(name, value, "a list of messages")
    found = []
    for message in value:
        if not isinstance(message, Mapping):
            raise _wrong(name, message, "{role, content}")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise _wrong(f"role in {name}", role, "one of " + ", ".join(ROLES))
        found.append({"role": ROLES[role], "content": _text(content, f"content in {name}")})
    return tuple(found)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def _wrong(name: str, value: Any, expected: str) -> DataError:
    return DataError(
        f"{name} of a record cannot be used", given=f"{type(value).__name__} {str(value)[:60]!r}",
        expected=expected,
    )  # fmt: skip
