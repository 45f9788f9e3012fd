"""Records of what people prefer: two answers to one prompt, or answers with a label.

prompt, chosen, rejected    three texts, or three lists of messages
chosen, rejected            two lists of messages that begin alike
..., label                  an example of `conversations.py` that ends with an answer, and whether
                            that is a good one: true or false
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.data.tuning.conversations import Conversation, conversation_of
from atoll.errors import DataError


def pair_of(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Return the preferred answer of a record and the other one, each with its prompt.

    Raises:
        DataError: it has other columns, a value of a wrong type, or two equal answers.
    """
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if chosen is None or rejected is None:
        raise DataError(
            "a record has no two answers", given=", ".join(map(str, record)) or "nothing",
            expected="prompt, chosen, rejected; or chosen, rejected as lists of messages",
        )  # fmt: skip
    prompt = record.get("prompt")
    if prompt is None:
        both = [conversation_of({"messages": messages}) for messages in (chosen, rejected)]
    else:
        answers = ({"prompt": prompt, "completion": one} for one in (chosen, rejected))
        both = [conversation_of(answer) for answer in answers]
    if both[0] == both[1]:
        raise DataError("both answers of a record are the same", given=str(chosen)[:60])
    return both[0], both[1]


_LABELS = {
    True: True, False: False, "true": True, "false": False, "1": True, "0": False,
}  # fmt: skip
"""Labels, in lower case; 1 and 0 are equal to the first two."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer with its prompt, and whether it is a good one."""

    conversation: Conversation
    good: bool

    @property
    def prompt(self) -> object:
        """The messages, or the text, before the answer."""
        return self.conversation.messages[:-1] or self.conversation.prompt

    def with_answer_of(self, other: Judged) -> Conversation:
        """Return this prompt with the answer of another example of the same kind."""
        own, theirs = self.conversation, other.conversation
        if own.messages:
            return Conversation(messages=(*own.messages[:-1], theirs.messages[-1]))
        return Conversation(prompt=own.prompt, completion=theirs.completion)


def judged_of(record: Mapping[str, Any]) -> list[Judged]:
    """Return the answers of a record that have a label; of two answers both.

    Raises:
        DataError: it has other columns, a value of a wrong type, no prompt, or no answer at its
            end.
    """
    label = record.get("label")
    if label is None:
        if record.get("chosen") is not None and record.get("rejected") is not None:
            chosen, rejected = pair_of(record)
            return [_judged(chosen, good=True), _judged(rejected, good=False)]
        raise DataError(
            "a record has no label", given=", ".join(map(str, record)) or "nothing",
            expected="prompt, completion, label; or messages, label; or chosen, rejected",
        )  # fmt: skip
    word = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(word, bool | int | str) or word not in _LABELS:
        raise DataError("a label cannot be read", given=repr(label)[:60], expected="true or false")
    without = {name: value for name, value in record.items() if name != "label"}
    return [_judged(conversation_of(without), good=_LABELS[word])]


def _judged(conversation: Conversation, *, good: bool) -> Judged:
    messages = conversation.messages
    if messages:
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                "a labelled conversation does not end with an answer",
                given=", ".join(message["role"] for message in messages),
                expected="a prompt, and the assistant's answer at the end",
            )
    elif not conversation.prompt or not conversation.completion:
        raise DataError(
            "a labelled record has no prompt, or no answer", given=conversation.completion[:60]
        )
    return Judged(conversation, good)
