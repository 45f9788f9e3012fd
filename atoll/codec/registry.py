"""Build codecs from their specs.

e.g. `fp32`, `int8:128`, `topk:0.01|int8`, `feedback(randomk:0.1|topk:0.2|int4)`, `auto(fp32,int8)`.
The codecs are rows of :data:`atoll.methods.codecs.CODECS`; only those in the spec are imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from atoll.codec.base import Codec
from atoll.codec.spec import Arguments, split_outside
from atoll.errors import ConfigError, unknown
from atoll.methods.codecs import CODECS, CodecRow


def make_codec(spec: str) -> Codec:
    """Return a new codec from its spec.

    Raises:
        ConfigError: a name is unknown (names the nearest one), a number is missing or out of range,
            or the codecs cannot be combined.
    """
    items = split_outside(spec, "|", spec)
    codec = _item(items[-1], spec)
    for text in reversed(items[:-1]):
        codec = _before(text, codec, spec)
    return codec


def base_spec(spec: str) -> str:
    """Return the canonical spec without wrappers, which decodes the packets; raises ConfigError."""
    return make_codec(spec).base.spec


def row_of(codec: Codec) -> CodecRow | None:
    """Return the row of a codec's outermost part; None if it is not in the table."""
    return CODECS.get(codec.spec.partition("|")[0].partition("(")[0].partition(":")[0])


def _build(row: CodecRow, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
    module, _, name = row.implementation.partition(":")
    codec: Codec = getattr(importlib.import_module(module), name).from_spec(arguments, inner)
    return codec


def _row(text: str, spec: str) -> tuple[CodecRow, Arguments]:
    name, *values = (part.strip() for part in text.split(":"))
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    row = CODECS[name]
    return row, Arguments(name, tuple(values), spec, row.example)


def _item(text: str, spec: str) -> Codec:
    head, bracket, rest = text.partition("(")
    row, arguments = _row(head, spec)
    if not row.wraps:
        if bracket:
            wrappers = [name for name, other in CODECS.items() if other.wraps]
            raise unknown("codec around another", row.name, wrappers)
        return _build(row, arguments, [make_codec("fp32")] if row.selects else [])
    if bracket and not rest.endswith(")"):
        raise ConfigError(
            "something follows a codec's bracket", given=repr(spec), expected=row.example
        )
    inner = [make_codec(part) for part in split_outside(rest[:-1], ",", spec)] if bracket else []
    return _build(row, arguments, inner)


def _before(text: str, values: Codec, spec: str) -> Codec:
    """Return a selecting codec combined with the codec of the selected values.

    Raises:
        ConfigError: it selects nothing, or `values` cannot encode its selection.
    """
    row, arguments = _row(text.partition("(")[0], spec)
    if row.wraps:
        raise ConfigError(
            "a codec that wraps another cannot stand before `|`",
            given=repr(spec), expected="the whole inside, e.g. feedback(topk:0.1|int8)",
        )  # fmt: skip
    if not row.selects:
        selecting = [name for name, other in CODECS.items() if other.selects]
        raise ConfigError(
            f"codec {row.name} cannot be followed by another codec",
            given=repr(spec), expected=f"one of {', '.join(selecting)} before `|`",
            remedy=f"topk:0.1|{row.name}" if row.name != "fp32" else "topk:0.1",
        )  # fmt: skip
    after = row_of(values)
    if values.base is not values or (after is not None and after.whole_vectors):
        raise ConfigError(
            "this codec cannot follow `|`: it depends on the shape or length of the whole vector",
            given=repr(spec), expected="the wrapper around the whole, e.g. feedback(topk:0.1|int8)",
        )  # fmt: skip
    chooses_again = after is not None and after.selects
    if chooses_again and not (row.name == "randomk" and values.needs_allgather):
        raise ConfigError(
            "only randomk can be followed by a selecting codec",
            given=repr(spec), expected="e.g. randomk:0.1|topk:0.2|int4",
        )  # fmt: skip
    return _build(row, arguments, [values])
