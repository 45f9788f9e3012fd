"""The table of codecs, and how their specs are read.

    spec     = name | name ":" number | "feedback" "(" spec ")"

e.g. `fp32`, `bf16`, `int8`, `int8:128`, `feedback(int8:128)`. A new codec is one file and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from atoll.codec.blockwise import BlockwiseInt8
from atoll.codec.cast import Cast
from atoll.codec.codec import Codec
from atoll.codec.feedback import Feedback
from atoll.errors import ConfigError, unknown

PLAIN: Mapping[str, Callable[[], Codec]] = MappingProxyType(
    {
        "fp32": lambda: Cast("fp32"),
        "fp16": lambda: Cast("fp16"),
        "bf16": lambda: Cast("bf16"),
        "int8": BlockwiseInt8,
    }
)
"""Name -> codec without a number."""

SIZED: Mapping[str, Callable[[int], Codec]] = MappingProxyType({"int8": BlockwiseInt8})
"""Name -> codec of the number after the colon."""

WRAPPERS: Mapping[str, Callable[[Codec], Codec]] = MappingProxyType({"feedback": Feedback})
"""Name -> codec around another codec."""


def make_codec(spec: str) -> Codec:
    """Return a new codec from its spec.

    Raises:
        ConfigError: a name is unknown (the nearest known one is named), a number is missing or
            out of range, or a wrapper wraps nothing or a wrapper.
    """
    text = spec.strip()
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if bracket:
        if name not in WRAPPERS:
            raise unknown("codec around another", name, WRAPPERS)
        if not rest.endswith(")"):
            raise ConfigError(
                "a codec's bracket is not closed", given=repr(spec), expected=f"{text})"
            )
        inner = make_codec(rest[:-1])
        if inner.base is not inner:
            raise ConfigError(
                f"{name} cannot wrap a codec that is wrapped already",
                given=repr(spec),
                expected=repr(inner.spec),
            )
        return WRAPPERS[name](inner)
    return _plain_codec(text, spec)


def _plain_codec(text: str, spec: str) -> Codec:
    """Return the codec of `name` or `name:number`; `spec` is shown in messages."""
    name, colon, number = (part.strip() for part in text.partition(":"))
    if name in WRAPPERS:
        raise ConfigError(
            f"{name} wraps another codec", given=repr(spec), expected=f"e.g. {name}(int8)"
        )
    if name not in PLAIN:
        raise unknown("codec", name, [*PLAIN, *WRAPPERS])
    if not colon:
        return PLAIN[name]()
    if name not in SIZED:
        raise ConfigError(f"codec {name} takes no number", given=repr(spec), expected=name)
    if not (number.isascii() and number.isdigit()):
        raise ConfigError(
            f"the number of codec {name} is wrong", given=repr(spec), expected=f"e.g. {name}:256"
        )
    return SIZED[name](int(number))


def base_spec(spec: str) -> str:
    """Return the canonical spec that decodes the packets of a codec: without wrappers.

    Raises:
        ConfigError: as `make_codec`.
    """
    return make_codec(spec).base.spec
