"""Messages of queues as JSON, for programs in any language: over HTTP and over a WebSocket.

Beside the fields of `atoll.wire.queue_messages`, an item may have `value`, any JSON value, in place
of `payload` (base64). Items that hold a JSON value are returned with `value` as well. `key` and
`lease_s` may be left out; the defaults are a random key and 60 seconds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from atoll.errors import ConfigError
from atoll.ids import new_token
from atoll.wire.messages import Message
from atoll.wire.queue_messages import JSON_PAYLOAD, QueueClaim, QueuePut

LEASE_S = 60.0

M = TypeVar("M", bound=Message)


def message_of(text: bytes | str, kind: type[M]) -> M:
    """Return the message in a JSON object; raises ConfigError."""
    try:
        found = json.loads(text or b"{}")
        return as_message(found, kind)
    except (ValueError, RecursionError) as error:
        raise _wrong(error) from error


def as_message(fields: object, kind: type[M]) -> M:
    """Return the message with these fields; raises ConfigError."""
    if not isinstance(fields, dict):
        raise _wrong("not an object")
    try:
        filled = _with_payload(fields) if kind is QueuePut else dict(fields)
        if kind is QueueClaim:
            filled.setdefault("lease_s", LEASE_S)
        if isinstance(filled.get("items"), list):
            filled["items"] = [_with_payload(one) for one in filled["items"]]
        found = msgspec.convert(filled, kind, builtin_types=())
        msgspec.msgpack.encode(found)  # rejects lone surrogates, which JSON allows
        return found
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise _wrong(error) from error


def shown(message: msgspec.Struct) -> Any:
    """Return an answer as plain JSON values."""
    found = msgspec.to_builtins(message)
    if isinstance(found, dict):
        items = found.get("items")
        if isinstance(items, list):
            found["items"] = [_with_value(one) for one in items]
    return found


def _with_payload(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item's fields with its payload in base64, and a key."""
    if not isinstance(fields, Mapping):
        raise TypeError("an item must be an object")
    filled = dict(fields)
    if "value" in filled:
        if "payload" in filled:
            raise ValueError("an item has a value or a payload, not both")
        text = json.dumps(filled.pop("value"), separators=(",", ":"), allow_nan=False)
        filled["payload"] = base64.b64encode(JSON_PAYLOAD + text.encode()).decode()
    filled.setdefault("key", new_token())
    return filled


def _with_value(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item's fields with its JSON value, if it is one."""
    payload = base64.b64decode(fields.get("payload") or "")
    if not payload.startswith(JSON_PAYLOAD):
        return fields
    try:
        value = json.loads(payload[len(JSON_PAYLOAD) :])
    except (ValueError, RecursionError):
        return fields
    return {**fields, "value": value}


def _wrong(error: object) -> ConfigError:
    return ConfigError("the body of the request is wrong", given=str(error)[:300])
