"""The codec interface: encode a flat float32 vector into a packet of bytes, and decode it.

A *packet* is one encoded vector. Decoding the same packet MUST give the same bits on any machine:
it uses at most one multiplication per element, which IEEE 754 rounds the same everywhere. Encoding
happens once, in one place, so it may use any order of operations.

Legend: n elements of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from atoll.errors import ConfigError, WireError

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Packet:
    """One encoded vector.

    `data` is a byte buffer that a socket sends without a copy. `codec` is the spec that decodes it,
    never a wrapper like `feedback(...)`. `sizes` are the element counts of the concatenated
    tensors; a codec writes one, a group may write more.
    """

    data: Buffer
    codec: str
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole vector."""
        return sum(self.sizes)


class Codec(Protocol):
    """Encodes flat float32 vectors into packets and decodes them.

    Stateless codecs are thread-safe.
    """

    @property
    def spec(self) -> str:
        """Canonical name: `make_codec(spec)` builds an equal codec."""

    @property
    def base(self) -> Codec:
        """The codec that decodes the packets: itself, or the one inside a wrapper."""

    def plain(self) -> Codec:
        """Return this codec without a scaling that keeps its mean unbiased, for error feedback."""

    @property
    def needs_allgather(self) -> bool:
        """Whether a mean of several vectors does not fit one packet, as with sparse ones.

        Members then exchange all packets and add them up themselves.
        """

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Set the shapes of the tensors in a vector, for codecs that use matrices.

        Called once, before the first vector; a vector of another length has no known shapes.
        """

    def set_round(self, round_: int) -> None:
        """Set the round of the next packets; the same number on every member."""

    def encode(self, x: Tensor, *, key: str = "x") -> Packet:
        """Return the packet of a contiguous float32 CPU vector, shape (n,); raises ConfigError.

        The packet owns its memory; `key` names the state of this vector (see `feedback`).
        Non-finite values are never hidden: the elements they affect decode to non-finite values.
        """

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Return the vector, shape (n,), float32, written into `out` if given.

        Raises:
            WireError: the packet is of another codec, or its length does not fit its sizes.
            ConfigError: `out` is not a contiguous float32 vector of n elements.
        """

    def decode_add(self, packet: Packet, *, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the decoded vector to `out`, without a temporary vector.

        With weight 1 the result bitwise equals `out + decode(packet)`; with another weight each
        element is rounded once more or once less than that. Raises as `decode`.
        """

    def nbytes(self, elements: int) -> int:
        """Return the exact length of `Packet.data` for a vector of so many elements."""

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return the codec that encodes a mean of decoded packets for all members.

        Usually `base`. It does not repeat scaling that the packets already contain, and matches the
        given packet of the mean, e.g. in its random positions (None: the round of `set_round`).
        """

    def restore_mean(
        self,
        mean: Tensor,
        *,
        key: str,
        contributors: Sequence[str] = (),
        weight: float = 1.0,
        alone: bool = False,
    ) -> Tensor:
        """Return the value of a committed mean: the mean itself, unless packets hold differences.

        Called on every member after a round's commit, with the result that all members received.

        Args:
            mean: The decoded mean, shape (n,).
            key: Key of the encoded vectors.
            contributors: Members with packets in it.
            weight: Sum of their weights.
            alone: Nothing was encoded, because there is no other member.
        """

    def finish(self, *, committed: bool) -> None:
        """Confirm or discard the packets since the last call."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to checkpoint; empty for most codecs."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""


class Stateless:
    """Defaults for a codec that keeps no state and treats all vectors alike."""

    needs_allgather = False

    @property
    def base(self) -> Codec:
        """This codec itself."""
        return cast("Codec", self)

    def plain(self) -> Codec:
        """Return this codec: it scales nothing."""
        return self.base

    def mean_codec(self, packet: Packet | None = None) -> Codec:
        """Return this codec."""
        return self.base

    def restore_mean(
        self,
        mean: Tensor,
        *,
        key: str,
        contributors: Sequence[str] = (),
        weight: float = 1.0,
        alone: bool = False,
    ) -> Tensor:
        """Return the mean as it is."""
        return mean

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """Do nothing."""

    def set_round(self, round_: int) -> None:
        """Do nothing."""

    def finish(self, *, committed: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if there is state, because it belongs to another codec."""
        if state:
            raise ConfigError(
                "this codec keeps no state",
                given=", ".join(sorted(state)),
                expected="nothing",
                remedy="resume with the codec the checkpoint was written with",
            )


def check_vector(x: Tensor, *, role: str, elements: int | None = None) -> Tensor:
    """Return `x`, detached; raises ConfigError unless it is a contiguous float32 CPU vector."""
    fits = (
        x.dtype == torch.float32
        and x.dim() == 1
        and x.is_contiguous()
        and x.device.type == "cpu"
        and elements in (None, x.numel())
    )
    if not fits:
        size = "" if elements is None else f" of {elements} elements"
        raise ConfigError(
            f"a codec cannot take this tensor as {role}",
            given=f"{x.dtype}, shape {tuple(x.shape)}, {x.device}, strides {x.stride()}",
            expected=f"a contiguous float32 vector{size} on the cpu",
            remedy="x.detach().float().flatten().cpu()",
        )
    return x.detach() if x.requires_grad else x


def check_packet(packet: Packet, codec: Codec) -> int:
    """Return the number of elements of a packet for `codec`.

    Raises:
        WireError: it is of another codec, or its length does not fit.
    """
    if packet.codec != codec.spec:
        raise WireError(
            "a packet was given to the wrong codec",
            given=repr(packet.codec),
            expected=repr(codec.spec),
            remedy="decode it with make_codec(packet.codec)",
        )
    elements = packet.num_elements
    if min(packet.sizes, default=0) < 0 or len(packet.data) != codec.nbytes(elements):
        raise WireError(
            f"a packet of codec {packet.codec} has the wrong length",
            given=f"{len(packet.data)} bytes for sizes {packet.sizes}",
            expected=f"{codec.nbytes(max(elements, 0))} bytes",
        )
    return elements


def output(out: Tensor | None, elements: int) -> Tensor:
    """Return the vector to decode into: `out`, or a new one; raises ConfigError for a misfit."""
    if out is None:
        return torch.empty(elements, dtype=torch.float32)
    return check_vector(out, role="the output", elements=elements)
