"""The table of codecs, and how their specs are read.

    spec  = item { "|" item }
    item  = name { ":" argument } [ "(" spec { "," spec } ")" ]

e.g. `fp32`, `int8:128`, `topk:0.01|int8`, `feedback(randomk:0.1|topk:0.2|int4)`, `auto(fp32,int8)`.
What stands before a `|` chooses numbers of a vector, what follows says how these are written. A new
codec is one file and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from atoll.codec.base import Codec
from atoll.codec.lowrank import LowRank
from atoll.codec.quantized.blockwise import BlockwiseInt8
from atoll.codec.quantized.cast import Cast
from atoll.codec.quantized.exponents import E3M0, BlockwiseFp8
from atoll.codec.quantized.integers import BlockwiseInt2, BlockwiseInt4
from atoll.codec.quantized.qsgd import QSGD
from atoll.codec.quantized.sigma8 import Sigma8
from atoll.codec.quantized.sign import Sign
from atoll.codec.sparse.dct import Dct
from atoll.codec.sparse.randomk import RandomK
from atoll.codec.sparse.topk import TopK
from atoll.codec.wrappers.auto import Auto
from atoll.codec.wrappers.by_role import ByRole
from atoll.codec.wrappers.by_size import BySize
from atoll.codec.wrappers.ef21 import EF21
from atoll.codec.wrappers.feedback import Feedback
from atoll.codec.wrappers.selecting import Selecting
from atoll.errors import ConfigError, unknown


@dataclass(frozen=True, slots=True)
class Arguments:
    """What stands after a codec's name, and the whole spec for messages."""

    name: str
    values: tuple[str, ...]
    spec: str
    example: str

    def at_most(self, count: int) -> None:
        """Check the number of arguments.

        Raises:
            ConfigError: there are more.
        """
        if len(self.values) > count:
            wanted = f"takes no more than {count} numbers" if count else "takes no number"
            raise ConfigError(
                f"codec {self.name} {wanted}", given=repr(self.spec), expected=self.example
            )

    def whole(self, default: int) -> int:
        """Return the first argument as a whole number."""
        if not self.values:
            return default
        text = self.values[0]
        if not (text.isascii() and text.isdigit()):
            raise self.wrong()
        return int(text)

    def share(self) -> float:
        """Return the first argument as a decimal number."""
        try:
            return float(self.values[0])
        except (ValueError, IndexError):
            raise self.wrong() from None

    def wrong(self) -> ConfigError:
        """Return the error for an argument that cannot be read."""
        return ConfigError(
            f"the number of codec {self.name} is wrong",
            given=repr(self.spec), expected=f"e.g. {self.example}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A codec of the table."""

    build: Callable[[Arguments], Codec]
    example: str
    about: str
    """One line for people."""
    select: Callable[[Arguments, Codec], Codec] | None = None
    """Builds it in front of another codec, where it chooses numbers."""


def _sized(kind: Callable[[int], Codec], default: int) -> Callable[[Arguments], Codec]:
    """Return what builds a codec of one whole number."""

    def build(given: Arguments) -> Codec:
        given.at_most(1)
        return kind(given.whole(default))

    return build


def _cast(given: Arguments) -> Codec:
    given.at_most(0)
    return Cast(given.name)


def _topk(given: Arguments, values: Codec) -> Codec:
    given.at_most(1)
    return TopK(given.share(), values)


def _randomk(given: Arguments, values: Codec) -> Codec:
    given.at_most(2)
    if given.values[1:] not in ((), ("plain",)):
        raise given.wrong()
    return RandomK(given.share(), values, scaled=len(given.values) < 2)


def _dct(given: Arguments, values: Codec) -> Codec:
    given.at_most(1)
    if not given.values:
        raise given.wrong()
    return Dct(given.whole(0), values)


def _lowrank(given: Arguments) -> Codec:
    given.at_most(1)
    if not given.values:
        raise given.wrong()
    return LowRank(given.whole(0))


def _sigma8(given: Arguments) -> Codec:
    given.at_most(2)
    if given.values[1:] not in ((), ("centred",)):
        raise given.wrong()
    return Sigma8(given.whole(6), centred=len(given.values) == 2)


def _before_fp32(select: Callable[[Arguments, Codec], Codec]) -> Callable[[Arguments], Codec]:
    """Return what builds a choosing codec that stands alone."""
    return lambda given: select(given, Cast("fp32"))


def _selecting(select: Callable[[Arguments, Codec], Codec], example: str, about: str) -> Row:
    return Row(_before_fp32(select), example, about, select)


CODECS: Mapping[str, Row] = MappingProxyType(
    {
        "fp32": Row(_cast, "fp32", "as it is"),
        "fp16": Row(_cast, "fp16", "half precision, up to 65504"),
        "bf16": Row(_cast, "bf16", "half the bytes, the range of fp32"),
        "fp8": Row(_sized(BlockwiseFp8, 256), "fp8:256", "e4m3, a scale per block"),
        "int8": Row(_sized(BlockwiseInt8, 256), "int8:256", "whole numbers, a scale per block"),
        "sigma8": Row(_sigma8, "sigma8:6", "256 buckets, and what the values in each mean"),
        "int4": Row(_sized(BlockwiseInt4, 256), "int4:256", "15 levels, a scale per block"),
        "e3m0": Row(_sized(E3M0, 256), "e3m0:256", "powers of two in 4 bits, a scale per block"),
        "int2": Row(_sized(BlockwiseInt2, 256), "int2:256", "-1, 0 or 1, a scale per block"),
        "sign": Row(_sized(Sign, 256), "sign:256", "one bit, a scale per block"),
        "qsgd": Row(_sized(QSGD, 127), "qsgd:127", "random rounding, unbiased"),
        "topk": _selecting(_topk, "topk:0.01", "the largest numbers only"),
        "randomk": _selecting(_randomk, "randomk:0.1", "numbers at random shared positions"),
        "dct": _selecting(_dct, "dct:32", "of 4096 numbers the largest cosine coefficients"),
        "lowrank": Row(_lowrank, "lowrank:4", "matrices as products of thin ones"),
    }
)
"""Name -> codec."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A codec around others."""

    build: Callable[[Arguments, Sequence[Codec]], Codec]
    """From its own arguments and the codecs in the brackets; none when there are no brackets."""
    example: str
    about: str


def _fed(given: Arguments, inner: Sequence[Codec]) -> Codec:
    """Return the one codec whose loss is to be made up for later.

    Raises:
        ConfigError: there is not one, it is wrapped itself, or it loses nothing on average.
    """
    given.at_most(0)
    if not inner:
        raise ConfigError(
            f"{given.name} wraps another codec",
            given=repr(given.spec), expected=f"e.g. {given.example}",
        )  # fmt: skip
    codec = inner[0]
    if len(inner) != 1 or (codec.base is not codec and not isinstance(codec, Auto)):
        raise ConfigError(
            f"{given.name} cannot wrap several codecs" if len(inner) != 1
            else f"{given.name} cannot wrap a codec that is wrapped already",
            given=repr(given.spec), expected=f"one plain codec, e.g. {given.example}",
        )  # fmt: skip
    if isinstance(codec, Auto):
        plain = codec.candidates if codec.spec != "auto" else _defaults(_FED)
        return Auto([_fed(given, [one]) for one in plain], spec=codec.spec)
    if isinstance(codec, QSGD):
        raise ConfigError(
            f"{given.name} around a codec that is unbiased does harm: its noise averages out by "
            "itself, and can be longer than what it is to make up for",
            given=repr(given.spec), expected=f"{codec.spec} alone, or {given.example}",
        )  # fmt: skip
    return codec.plain() if isinstance(codec, RandomK) else codec


_PLAIN = ("fp32", "bf16", "int8")
_FED = (*_PLAIN, "int4")
"""What `auto` chooses from, alone and where a wrapper makes up for what is lost."""


def _defaults(specs: Sequence[str]) -> list[Codec]:
    return [make_codec(spec) for spec in specs]


def _auto(given: Arguments, inner: Sequence[Codec]) -> Codec:
    given.at_most(0)
    if not inner:
        return Auto(_defaults(_PLAIN), spec="auto")
    return Auto(inner, spec=f"auto({','.join(codec.spec for codec in inner)})")


def _by_size(given: Arguments, inner: Sequence[Codec]) -> Codec:
    given.at_most(1)
    if len(inner) != 2 or not given.values:
        raise ConfigError(
            "by_size takes a number of elements and two codecs",
            given=repr(given.spec), expected=f"e.g. {given.example}",
        )  # fmt: skip
    return BySize(given.whole(0), *inner)


def _by_role(given: Arguments, inner: Sequence[Codec]) -> Codec:
    given.at_most(0)
    if len(inner) != 2:
        raise ConfigError(
            "by_role takes a codec for matrices and one for all else",
            given=repr(given.spec), expected=f"e.g. {given.example}",
        )  # fmt: skip
    return ByRole(*inner)


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "feedback": Wrapper(
            lambda given, inner: Feedback(_fed(given, inner)),
            "feedback(int8)",
            "what was lost in a round goes along in the next",
        ),
        "ef21": Wrapper(
            lambda given, inner: EF21(_fed(given, inner)),
            "ef21(topk:0.1)",
            "differences to what was sent so far; everybody keeps the sum",
        ),
        "auto": Wrapper(
            _auto, "auto(fp32,bf16,int8)", "the codec that pays at the measured speed of the link"
        ),
        "by_size": Wrapper(
            _by_size, "by_size:65536(fp32,int8)", "short vectors in one codec, long ones in another"
        ),
        "by_role": Wrapper(
            _by_role, "by_role(topk:0.01,bf16)", "matrices in one codec, everything else in another"
        ),
    }
)
"""Name -> codec around others."""


def make_codec(spec: str) -> Codec:
    """Return a new codec from its spec.

    Raises:
        ConfigError: a name is unknown (the nearest known one is named), a number is missing or
            out of range, or codecs are put together that do not fit each other.
    """
    items = _split(spec, "|", spec)
    codec = _item(items[-1], spec)
    for text in reversed(items[:-1]):
        codec = _before(text, codec, spec)
    return codec


def base_spec(spec: str) -> str:
    """Return the canonical spec that decodes the packets of a codec: without wrappers.

    Raises:
        ConfigError: as `make_codec`.
    """
    return make_codec(spec).base.spec


def _split(text: str, mark: str, spec: str) -> list[str]:
    """Return the parts of a text between marks that lie in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ConfigError("a codec's bracket was never opened", given=repr(spec))
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ConfigError(
            "a codec's bracket is not closed", given=repr(spec), expected=f"{spec.strip()})"
        )
    return [part.strip() for part in parts]


def _item(text: str, spec: str) -> Codec:
    """Return the codec of one item."""
    head, bracket, rest = text.partition("(")
    name, *values = (part.strip() for part in head.split(":"))
    if not bracket and name not in WRAPPERS:
        row, given = _row(text, spec)
        return row.build(given)
    if name not in WRAPPERS:
        raise unknown("codec around another", name, WRAPPERS)
    wrapper = WRAPPERS[name]
    if bracket and not rest.endswith(")"):
        raise ConfigError(
            "something follows a codec's bracket", given=repr(spec), expected=wrapper.example
        )
    inner = [make_codec(part) for part in _split(rest[:-1], ",", spec)] if bracket else []
    return wrapper.build(Arguments(name, tuple(values), spec, wrapper.example), inner)


def _row(text: str, spec: str) -> tuple[Row, Arguments]:
    """Return the row and the arguments of `name:argument:...`."""
    name, *values = (part.strip() for part in text.split(":"))
    if name not in CODECS:
        raise unknown("codec", name, [*CODECS, *WRAPPERS])
    row = CODECS[name]
    return row, Arguments(name, tuple(values), spec, row.example)


def _before(text: str, values: Codec, spec: str) -> Codec:
    """Return the codec that chooses numbers for `values` to encode.

    Raises:
        ConfigError: it chooses nothing, or what follows cannot take what it chose.
    """
    if "(" in text or text in WRAPPERS:
        raise ConfigError(
            "a codec that wraps another cannot stand before `|`",
            given=repr(spec), expected="the whole inside, e.g. feedback(topk:0.1|int8)",
        )  # fmt: skip
    row, given = _row(text, spec)
    selecting = [name for name, other in CODECS.items() if other.select]
    if row.select is None:
        raise ConfigError(
            f"codec {given.name} leaves nothing for another to encode",
            given=repr(spec), expected=f"one of {', '.join(selecting)} before `|`",
            remedy=f"topk:0.1|{given.name}" if given.name != "fp32" else "topk:0.1",
        )  # fmt: skip
    if values.base is not values or isinstance(values, ByRole | BySize | LowRank):
        raise ConfigError(
            "this codec cannot follow `|`: what it knows is not about numbers chosen from a vector",
            given=repr(spec), expected="the wrapper around the whole, e.g. feedback(topk:0.1|int8)",
        )  # fmt: skip
    if isinstance(values, Selecting) and not (given.name == "randomk" and values.needs_allgather):
        raise ConfigError(
            "only randomk leaves a choice to what follows it",
            given=repr(spec), expected="e.g. randomk:0.1|topk:0.2|int4",
        )  # fmt: skip
    return row.select(given, values)
