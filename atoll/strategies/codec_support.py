"""Which codecs a method can use, and why not others: data about names. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GATHERING = frozenset({"topk", "dct", "lowrank", "by_role"})
"""Codecs whose packets do not add up: members get each other's."""
PAIRED = frozenset({"gossip", "pairwise", "noloco"})
"""Outer strategies in which members give models to each other, and nobody makes a mean of all."""
SERVED = frozenset({"asynchronous", "server"})
"""Outer strategies in which a server takes what comes, one by one."""
MEMORY = frozenset({"feedback", "ef21", "auto"})
"""Codecs that remember something from one vector to the next."""
PRECISE = frozenset({"fp32", "fp16", "bf16", "int8", "sigma8", "by_size"})
"""Codecs that keep nothing and lose next to nothing of any number."""


@dataclass(frozen=True, kw_only=True)
class CodecSupport:
    """Which codecs a method can use, and why not others."""

    why: str
    refused: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    """If not empty: the only ones."""
    nearest: str

    def refuses(self, codecs: frozenset[str]) -> bool:
        """Return whether one of the names in a codec's spec is not for this method."""
        return bool(codecs & self.refused) or bool(self.taken and codecs - self.taken)


TASTES: Mapping[str, CodecSupport] = MappingProxyType(
    {
        "sparta": CodecSupport(
            why="what travels are parameters themselves, other ones in every step",
            taken=PRECISE, nearest="int8",
        ),
        "powersgd": CodecSupport(
            why="it feeds back errors by itself, and its factors' axes change every round",
            taken=PRECISE, nearest="int8",
        ),
        "demo": CodecSupport(
            why="what is not sent stays in its momentum, other components in every step",
            refused=GATHERING | MEMORY, nearest="bf16",
        ),
        "cocktail": CodecSupport(
            why="it feeds back by itself what its codec loses", refused=MEMORY,
            nearest="topk:0.2|int4",
        ),
        "onebit_adam": CodecSupport(
            why="it feeds back by itself what its codec loses", refused=MEMORY, nearest="sign"
        ),
        "sign_majority": CodecSupport(
            why="votes are one sign per number: nothing to remember or to leave out",
            refused=GATHERING | MEMORY, nearest="sign",
        ),
        **dict.fromkeys(
            PAIRED,
            CodecSupport(
                why="members need each other's whole parameters, not differences",
                refused=GATHERING | {"ef21", "randomk"}, nearest="int8",
            ),
        ),
        **dict.fromkeys(
            SERVED,
            CodecSupport(
                why="servers apply what single members push as it comes",
                refused=frozenset({"ef21"}), nearest="feedback(int8)",
            ),
        ),
    }
)  # fmt: skip
"""Outer strategy -> its codecs, where not all will do."""
