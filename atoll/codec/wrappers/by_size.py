"""by_size: short vectors in one codec, long ones in another.

`by_size:65536(fp32,int8)` sends vectors of fewer than 65536 numbers as fp32 and others as int8: a
method that sends many pieces wastes nothing on precision where pieces are small. On the direct
route members exchange chunks of a vector, and it is the chunks' size that counts there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless
from atoll.errors import ConfigError, WireError


class BySize(Stateless):
    """Delegates by the number of elements.

    Args:
        limit: Vectors of fewer elements are short.
        short: Their codec.
        long: That of all others.

    Raises:
        ConfigError: a codec has a memory, or has no mean in one packet: members would have to do
            different things for vectors of different lengths.
    """

    def __init__(self, limit: int, short: Codec, long: Codec) -> None:
        self.spec = f"by_size:{limit}({short.spec},{long.spec})"
        for codec in (short, long):
            if codec.base is not codec or codec.needs_allgather or isinstance(codec, BySize):
                raise ConfigError(
                    "by_size chooses between two plain codecs whose packets have a mean",
                    given=repr(self.spec), expected="e.g. by_size:65536(fp32,int8)",
                    remedy="put the wrapper outside: feedback(by_size:65536(fp32,int4))",
                )  # fmt: skip
        self.limit, self.short, self.long = limit, short, long
        self.block = max(int(getattr(codec, "block", 1)) for codec in (short, long))

    def set_round(self, round_: int) -> None:
        """Tell both the round."""
        self.short.set_round(round_)
        self.long.set_round(round_)

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Tell both the shapes."""
        self.short.set_shapes(shapes)
        self.long.set_shapes(shapes)

    def of(self, elements: int) -> Codec:
        """Return the codec of a vector of so many elements."""
        return self.short if elements < self.limit else self.long

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return self.of(elements).nbytes(elements)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of the codec for this length."""
        return self.of(x.numel()).encode(x, key=key)

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        return self._of(packet).decode(packet, out=out)

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        self._of(packet).decode_add(packet, out=out, weight=weight)

    def mean_codec(self, packet: Packet | None = None) -> Codec:  # type: ignore[override]
        """Return what encodes a mean of such packets."""
        if packet is not None:
            return self._of(packet).mean_codec(packet)
        return BySize(self.limit, self.short.mean_codec(), self.long.mean_codec())

    def _of(self, packet: Packet) -> Codec:
        """Return the codec of a packet."""
        codec = self.of(max(packet.num_elements, 0))
        if codec.spec == packet.codec:
            return codec
        raise WireError(
            "a packet was given to the wrong codec",
            given=repr(packet.codec), expected=f"{codec.spec!r} for {packet.num_elements} elements",
        )  # fmt: skip
