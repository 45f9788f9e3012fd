"""Records of two answers to one prompt, the first preferred, as two conversations.

prompt, chosen, rejected    three texts, or three lists of messages
chosen, rejected            two lists of messages that begin alike
"""

from __future__ import annotations

from collections.abc import Mapping
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
