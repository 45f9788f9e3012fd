"""What stages exchange instead of whole activations and gradients: subspaces and codecs.

`torch.distributed.pipelining` sends floating-point tensors, and back gradients of the same shape.
A codec's packet is therefore sent as a *carrier*: its bytes as a float32 tensor, with the shape of
what is inside in front. Nothing computes with a carrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.codec.registry import make_codec, row_of
from atoll.errors import ConfigError
from atoll.strategies.inner.options import ActivationFormat
from atoll.strategies.inner.pipeline.subspace import TokenBoundary

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 8
"""int32 numbers before a packet: type, dimensions, and up to 6 sizes."""


class Activations:
    """How one rank packs what its stages exchange.

    Packing in a subspace needs the tokens of the microbatch: `begin` a batch and `enter` each
    microbatch before its forward pass.
    """

    def __init__(self, form: ActivationFormat) -> None:
        """Raise ConfigError if the codec keeps state, or depends on the shape of a vector."""
        self._codec = activation_codec(form.codec) if form.codec else None
        self.boundary: TokenBoundary | None = None
        """Set by the owner before the first pass, if the activations are in a subspace."""
        self._parts: Sequence[Tensor] = ()
        self._tokens: Tensor | None = None

    def begin(self, parts: Sequence[Tensor]) -> None:
        """Take the model's inputs by microbatch."""
        self._parts = parts

    def enter(self, microbatch: int) -> None:
        """Choose the microbatch of the next forward pass."""
        self._tokens = self._parts[microbatch] if self._parts else None

    def pack(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what is sent instead of activations, with their gradient."""
        if self.boundary is not None and self._tokens is not None:
            values = (self.boundary.pack(values[0], self._tokens), *values[1:])
        if self._codec is not None:
            values = tuple(_through(_Encoded, value, self._codec) for value in values)
        return values

    def unpack(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return activations from what was sent, with their gradient."""
        if self._codec is not None:
            values = tuple(_through(_Decoded, value, self._codec) for value in values)
        if self.boundary is not None and self._tokens is not None:
            values = (self.boundary.unpack(values[0], self._tokens), *values[1:])
        return values


def activation_codec(spec: str, *, remedy: str = 'activations = "int8" in [island]') -> Codec:
    """Return the codec of activations that are sent as carriers.

    Raises:
        ConfigError: it keeps state, or the number of its bytes depends on what it encodes.
    """
    codec = stateless_codec(spec, remedy=remedy)
    row = row_of(codec)
    if codec.base is not codec or (row is not None and row.whole_vectors):
        raise _refused(spec, "one that treats all vectors alike", remedy)
    return codec


def stateless_codec(spec: str, *, remedy: str) -> Codec:
    """Return a codec; raises ConfigError for one that keeps state from one vector to the next.

    Such state assumes that consecutive vectors are similar, which activations are not.
    """
    codec = make_codec(spec)
    row = row_of(codec)
    if row is not None and row.remembers:
        raise _refused(spec, "a codec without state", remedy)
    return codec


def _refused(spec: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError(
        "activations cannot be sent with this codec",
        given=repr(spec), expected=expected, remedy=remedy,
    )  # fmt: skip


def encoded(x: Tensor, codec: Codec) -> Tensor:
    """Return the carrier of a tensor of at most 6 dimensions."""
    packet = codec.encode(x.detach().reshape(-1).float().cpu().contiguous())
    nbytes = len(packet.data)
    carrier = torch.zeros(_HEADER + math.ceil(nbytes / 4), dtype=torch.int32)
    head = [_TYPES.index(x.dtype), x.dim(), *x.shape]
    carrier[: len(head)] = torch.tensor(head)
    data = torch.frombuffer(bytearray(packet.data), dtype=torch.uint8)
    carrier[_HEADER:].view(torch.uint8)[:nbytes] = data
    return carrier.view(torch.float32).to(x.device)


def decoded(carrier: Tensor, codec: Codec) -> Tensor:
    """Return the tensor in a carrier."""
    words = carrier.detach().cpu().contiguous().view(torch.int32)
    kind, dimensions, *sizes = words[:_HEADER].tolist()
    shape = sizes[:dimensions]
    elements = math.prod(shape)
    data = bytes(words[_HEADER:].view(torch.uint8)[: codec.nbytes(elements)].numpy().data)
    x = codec.decode(Packet(data, codec.spec, (elements,)))
    return x.reshape(shape).to(device=carrier.device, dtype=_TYPES[kind])


def _through(function: Any, value: Tensor, codec: Codec) -> Tensor:
    found: Tensor = function.apply(value, codec) if value.is_floating_point() else value
    return found


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec) -> Tensor:
        ctx.codec = codec
        return encoded(x, codec)

    @staticmethod
    def backward(ctx: Any, *carriers: Tensor) -> tuple[Tensor, None]:
        return decoded(carriers[0], ctx.codec), None


class _Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, codec: Codec) -> Tensor:
        ctx.codec = codec
        return decoded(carrier, codec)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return encoded(gradients[0], ctx.codec), None
