"""by_size: encode short vectors with one codec and long ones with another.

`by_size:65536(fp32,int8)` sends vectors of fewer than 65536 values as fp32 and others as int8, so
that small pieces keep full precision. On the direct route the size of a member's chunk counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.codec.base import Codec, Packet
from atoll.codec.spec import Arguments
from atoll.codec.wrappers.wrapper import Wrapper, wrong_codec
from atoll.errors import ConfigError


class BySize(Wrapper):
    """Uses `short` for vectors of fewer than `limit` elements, and `long` for the rest.

    Raises:
        ConfigError: a codec is stateful or needs an all-gather: members would act differently for
            vectors of different lengths.
    """

    def __init__(self, limit: int, short: Codec, long: Codec) -> None:
        self.spec = f"by_size:{limit}({short.spec},{long.spec})"
        for codec in (short, long):
            if codec.base is not codec or codec.needs_allgather or isinstance(codec, BySize):
                raise ConfigError(
                    "by_size chooses between two plain codecs with packets that can be averaged",
                    given=repr(self.spec), expected="e.g. by_size:65536(fp32,int8)",
                    remedy="put the wrapper outside: feedback(by_size:65536(fp32,int4))",
                )  # fmt: skip
        super().__init__([short, long])
        self.limit, self.short, self.long = limit, short, long
        self.block = max(int(getattr(codec, "block", 1)) for codec in (short, long))

    @classmethod
    def from_spec(cls, arguments: Arguments, inner: Sequence[Codec]) -> Codec:
        """Build `by_size:limit(short,long)`."""
        arguments.at_most(1)
        if len(inner) != 2 or not arguments.values:
            raise ConfigError(
                "by_size takes a number of elements and two codecs",
                given=repr(arguments.spec), expected=f"e.g. {arguments.example}",
            )  # fmt: skip
        return cls(arguments.whole(0), *inner)

    def of(self, elements: int) -> Codec:
        """Return the codec for so many elements."""
        return self.short if elements < self.limit else self.long

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return the codec that encodes a mean of such packets."""
        if packet is not None:
            return self.decoder(packet).mean_codec(packet)
        return BySize(self.limit, self.short.mean_codec(), self.long.mean_codec())

    def decoder(self, packet: Packet) -> Codec:
        """Return the codec for a packet's length."""
        codec = self.of(max(packet.num_elements, 0))
        if codec.spec == packet.codec:
            return codec
        raise wrong_codec(packet, f"{codec.spec!r} for {packet.num_elements} elements")
