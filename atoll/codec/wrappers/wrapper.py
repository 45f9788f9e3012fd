"""Base class of codecs around other codecs: delegates every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from atoll.codec.base import Codec, Packet, Stateless
from atoll.errors import ConfigError, WireError

SHARED, INNER = "shared.", "inner."
"""Prefixes of state keys: equal on all members, and of the inner codec."""


class Wrapper(Stateless):
    """Delegates to the inner codecs; subclasses override what differs.

    The first part encodes and decodes, unless `of` and `decoder` are overridden.
    """

    def __init__(self, parts: Sequence[Codec]) -> None:
        self.parts = tuple(parts)

    def of(self, elements: int) -> Codec:
        """Return the codec for a vector of `elements` elements."""
        return self.parts[0]

    def decoder(self, packet: Packet) -> Codec:
        """Return the codec that decodes a packet; raises WireError if none does."""
        return self.parts[0]

    @property
    def needs_allgather(self) -> bool:  # type: ignore[override]
        """As the codec in use."""
        return self.of(0).needs_allgather

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Set the shapes of the inner codecs."""
        for codec in self.parts:
            codec.set_shapes(shapes)

    def set_round(self, round_: int) -> None:
        """Set the round of the inner codecs."""
        for codec in self.parts:
            codec.set_round(round_)

    def nbytes(self, elements: int) -> int:
        """Return the exact length of a packet."""
        return self.of(elements).nbytes(elements)

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a vector, shape (n,)."""
        return self.of(x.numel()).encode(x, key=key)

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,)."""
        return self.decoder(packet).decode(packet, out=out)

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the vector to `out`."""
        self.decoder(packet).decode_add(packet, out=out, weight=weight)

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return the codec that encodes a mean of such packets."""
        return self.of(0).mean_codec(packet)

    def finish(self, *, committed: bool) -> None:
        """Finish the inner codecs."""
        for codec in self.parts:
            codec.finish(committed=committed)


def wrong_codec(packet: Packet, expected: str) -> WireError:
    """Return the error for a packet that a codec does not decode."""
    return WireError(
        "a packet was given to the wrong codec",
        given=repr(packet.codec), expected=expected,
        remedy="decode it with make_codec(packet.codec)",
    )  # fmt: skip


def check_size(kept: Tensor, x: Tensor, *, what: str) -> None:
    """Raise ConfigError unless a vector has the size of the state kept for its key."""
    if kept.numel() != x.numel():
        raise ConfigError(
            f"{what} belongs to a vector of another size",
            given=f"{x.numel()} elements",
            expected=f"{kept.numel()} elements",
            remedy="use one key per vector, and resume with the same model",
        )


def inner_state(inner: Codec) -> dict[str, Tensor]:
    """Return an inner codec's state under its wrapper's keys; `shared.*` keeps its name."""
    return {
        name if name.startswith(SHARED) else INNER + name: value
        for name, value in inner.state_dict().items()
    }


def load_inner_state(inner: Codec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load an inner codec's part of the wrapper's state, and return the rest."""
    names = [name for name in state if name.startswith((SHARED, INNER))]
    inner.load_state_dict({name.removeprefix(INNER): state[name] for name in names})
    return {name: value for name, value in state.items() if name not in names}
