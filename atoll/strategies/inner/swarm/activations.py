"""Encode the tensors that pass between two stages: activations, and their gradients.

Numbers of floating point pass through any codec that keeps no state from one vector to the next;
every other tensor (token ids, masks) goes as it is, and so do all with codec `fp32`, in their own
type. Each tensor is a vector of its own, with blocks that begin in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from atoll.codec.base import Buffer, Codec, Packet
from atoll.codec.registry import make_codec
from atoll.errors import AtollError, WireError
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.pipeline.activations import stateless_codec

DEFAULT, PLAIN = "int8", "fp32"
AS_IT_IS = ""
"""Codec name of a tensor that was not encoded."""
MOST_ELEMENTS = 1 << 30
"""Of one tensor: more is a damaged header."""
MOST_TENSORS = 64
KEPT = 16
"""Codecs in the cache, one per shape; those that use shapes receive theirs once."""

TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        str(kind).removeprefix("torch."): kind
        for kind in (
            torch.float32, torch.float64, torch.float16, torch.bfloat16,
            torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        )
    }
)  # fmt: skip


class TensorHead(msgspec.Struct, frozen=True, array_like=True):
    """Describes one encoded tensor."""

    shape: list[int]
    dtype: str
    """Of the tensor, e.g. `bfloat16`; empty: there is none, as the gradient of token ids."""
    codec: str
    """Spec that decodes it; empty: its bytes as they are."""
    nbytes: int


class ActivationCodec:
    """Encodes and decodes what passes between stages; for one thread."""

    def __init__(self, spec: str = DEFAULT) -> None:
        """Use the codec of a spec, which may be in a subspace; the stages project by themselves.

        Raises:
            ConfigError: it is unknown, or keeps state from one vector to the next.
        """
        form = ActivationFormat.of(spec)
        codec = stateless_codec(form.codec or PLAIN, remedy=f'codec = "{DEFAULT}" in [swarm]')
        self.spec = codec.spec
        self._unchanged = codec.spec == PLAIN
        self._encoders: dict[tuple[int, ...], Codec] = {}
        self._decoders: dict[str, Codec] = {}

    def encode(
        self, tensors: Sequence[Tensor | None], *, number: int = 0
    ) -> tuple[list[TensorHead], list[Buffer]]:
        """Return heads and bytes of tensors on any device; `number` seeds random positions."""
        heads: list[TensorHead] = []
        data: list[Buffer] = []
        for tensor in tensors:
            if tensor is None:
                heads.append(TensorHead([], "", AS_IT_IS, 0))
                continue
            spec, packed = self._encoded(tensor.detach(), number)
            kind, size = str(tensor.dtype).removeprefix("torch."), len(packed)
            heads.append(TensorHead(list(tensor.shape), kind, spec, size))
            data.append(packed)
        return heads, data

    def decode(self, heads: Sequence[TensorHead], data: Buffer) -> tuple[Tensor | None, ...]:
        """Return the tensors in main memory, each with memory of its own.

        Raises:
            WireError: heads and bytes do not fit each other.
        """
        rest = memoryview(data)
        if len(heads) > MOST_TENSORS or sum(head.nbytes for head in heads) != len(rest):
            raise WireError(
                "the bytes of a microbatch do not fit their heads", given=f"{len(rest)} bytes",
                expected=f"{sum(head.nbytes for head in heads)} of {len(heads)} tensors",
            )  # fmt: skip
        found: list[Tensor | None] = []
        for head in heads:
            if head.nbytes < 0:
                raise WireError("a tensor has a negative length", given=head.nbytes)
            part, rest = rest[: head.nbytes], rest[head.nbytes :]
            found.append(self._decoded(head, part) if head.dtype else None)
        return tuple(found)

    def _encoded(self, tensor: Tensor, number: int) -> tuple[str, Buffer]:
        if self._unchanged or not tensor.is_floating_point() or not tensor.numel():
            plain = tensor.cpu().contiguous().flatten().view(torch.uint8)
            return AS_IT_IS, memoryview(plain.numpy().data)
        codec = self._encoder(tuple(tensor.shape))
        codec.set_round(number)
        vector = tensor.to("cpu", torch.float32).contiguous().flatten()
        packet = codec.encode(vector)
        return packet.codec, packet.data

    def _encoder(self, shape: tuple[int, ...]) -> Codec:
        if shape not in self._encoders:
            if len(self._encoders) >= KEPT:
                del self._encoders[next(iter(self._encoders))]
            codec = make_codec(self.spec)
            # As matrices: one row per token or pixel, one column per feature.
            columns = shape[-1] if shape else 1
            codec.set_shapes([(math.prod(shape) // columns, columns)])
            self._encoders[shape] = codec
        return self._encoders[shape]

    def _decoded(self, head: TensorHead, part: memoryview) -> Tensor:
        kind, elements = TYPES.get(head.dtype), math.prod(head.shape)
        sizes = (*head.shape, elements)
        if kind is None or not all(0 <= size <= MOST_ELEMENTS for size in sizes):
            raise WireError(
                "a tensor's head is not usable", given=f"{head.dtype}, shape {head.shape}"
            )
        if head.codec == AS_IT_IS:
            if len(part) != elements * kind.itemsize:
                raise WireError(
                    "a tensor has the wrong length", given=f"{len(part)} bytes",
                    expected=f"{elements * kind.itemsize}",
                )  # fmt: skip
            found = torch.empty(elements, dtype=kind)
            if elements:
                found.view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
            return found.view(head.shape)
        try:
            packet = Packet(part, head.codec, (elements,))
            return self._decoder(head.codec).decode(packet).view(head.shape).to(kind)
        except AtollError as error:
            raise WireError("a tensor cannot be decoded", given=str(error)) from error

    def _decoder(self, spec: str) -> Codec:
        if spec not in self._decoders:
            if len(self._decoders) >= KEPT:
                del self._decoders[next(iter(self._decoders))]
            self._decoders[spec] = make_codec(spec)
        return self._decoders[spec]
