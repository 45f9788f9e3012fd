"""Every decoder of bytes that others send: a function of bytes, and seeds that it accepts.

A decoder may refuse with an `AtollError`; every other exception is a crash.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.code.packing import pack as pack_code
from atoll.code.unpacking import unpack as unpack_code
from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.codec.sparse.patches import apply_patch, make_patch
from atoll.config.reading import parse_spec
from atoll.errors import AtollError
from atoll.methods.codecs import CODECS
from atoll.net.endpoint import parse_ticket
from atoll.queues import serialization
from atoll.reducer.all_to_all import open_bundle, open_direct, open_outgoing
from atoll.wire import frames, swarm
from atoll.wire.chunks import ChunkHead, pack_chunk, unpack_chunk
from atoll.wire.manifest import decode_manifest
from atoll.wire.messages import (
    Hello,
    Launch,
    Metrics,
    NodeInfo,
    Point,
    QueuePut,
    RoundJoin,
    RoundVote,
    pack,
    pack_command,
    unpack,
    unpack_command,
)
from atoll.wire.pairing import read_code
from atoll.wire.parameter_server_frames import ServerFrameHead, pack_frame, unpack_frame
from atoll.wire.parameter_server_messages import unpack_answer as unpack_server_answer
from atoll.wire.parameter_server_messages import unpack_ask as unpack_server_ask
from atoll.wire.part_header import read_header
from atoll.wire.peer_pieces import unpack_piece
from atoll.wire.recovery_messages import (
    StateAnswer,
    StateAsk,
    ask_of,
    decode_state_manifest,
    encode_state_manifest,
    pack_answer,
    pack_ask,
    path_of,
    state_manifest,
    unpack_answer,
    unpack_ask,
)
from atoll.wire.spake2 import decoded
from bench.attack.site import SPEC, TRAINER

ELEMENTS = 300
"""Of the vectors whose packets are damaged."""

Decoder = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """One decoder."""

    decode: Decoder
    seeds: Sequence[bytes]

    def __call__(self, data: bytes) -> None:
        """Decode; a refusal is as good as a result."""
        with contextlib.suppress(AtollError):
            self.decode(data)


def _frame(data: bytes) -> object:
    frame = frames.decode(data)
    if frame.kind is frames.Kind.RELAY:
        frames.verify(frame)
        return frames.decode_relay(frame)
    return unpack(frame)


def _body(data: bytes) -> object:
    """Decode an envelope whose checksum is right."""
    return unpack(frames.Frame(frames.Kind.CONTROL, memoryview(data), data))


def _text(decode: Callable[[str], object]) -> Decoder:
    return lambda data: decode(data.decode("utf-8", "replace"))


def _view(decode: Callable[[memoryview], object]) -> Decoder:
    return lambda data: decode(memoryview(data))


def _codec(spec: str) -> Target:
    """Return the decoder of the packets of a codec, cut or filled to the length that it checks."""
    codec = make_codec(spec)
    packet = codec.encode(torch.linspace(-1.0, 1.0, ELEMENTS), key="x")
    good, spec = bytes(packet.data), packet.codec

    def decode(data: bytes) -> object:
        fitted = data[: len(good)].ljust(len(good), b"\xff")
        return make_codec(spec).decode(Packet(fitted, spec, (ELEMENTS,)))

    return Target(decode, [good, bytes(len(good)), b"\xff" * len(good)])


def _code_spec(data: bytes) -> object:
    """Read a codec's spec as a reducer does: it asks for the size first."""
    return make_codec(data.decode("utf-8", "replace")).nbytes(ELEMENTS)


class _CodePack:
    """Unpack a pack of code into a folder that is emptied every time."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atoll-fuzz-"))
        (self._folder / "code").mkdir()
        (self._folder / "code" / "train.py").write_text(
            "print(1)\n", encoding="utf-8", newline="\n"
        )
        self.good = Path(pack_code(self._folder / "code").path).read_bytes()
        self._number = 0

    def __call__(self, data: bytes) -> int:
        """Unpack."""
        self._number += 1
        source, target = self._folder / "pack", self._folder / f"out{self._number}"
        source.write_bytes(data)
        return unpack_code(source, target)


def targets() -> dict[str, Target]:
    """Return all decoders by name."""
    hello = Hello(1, "0.1.0", "job/w0", "token", "i1", NodeInfo("box", "Linux", "3.11", "0.1.0"))
    bodies = [
        hello, QueuePut("q", "k", b"x"), RoundJoin(3, "base"), RoundVote(3, 7, True, "d", ["w0"]),
        Metrics("i", 1, [Point(1.0, 1, 1, {"loss": 2.0})]),
    ]  # fmt: skip
    packed = [pack(body, id=number) for number, body in enumerate(bodies)]
    launch = Launch("job", "w0", 0, "t", SPEC, {"a.py": "x"})
    head = ChunkHead("contribute", 7, 3, 0, 1, 4, "fp32", [1], 1.0)
    chunk = b"".join(map(bytes, pack_chunk(head, b"abcd")))
    state = state_manifest(memoryview(b"x" * 9), job="j", round_=3, base="b", name="shared")
    ask, answer = StateAsk(1, "chunk", 3, "shared"), StateAnswer(1, "ok", 3)
    server = b"".join(map(bytes, pack_frame(ServerFrameHead("ask", 1, body=b"\x80"))))
    value = b"".join(bytes(part) for part in serialization.encode({"a": [1, "x", None]}))
    tensors = b"".join(bytes(part) for part in serialization.encode({"a": torch.ones(3)}))
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    code = _CodePack()
    weights = {"w": torch.zeros(64), "v": torch.zeros(9, dtype=torch.bfloat16)}
    patch = make_patch(weights, {**weights, "w": torch.ones(64)}, version=1)
    found = {
        "patch of weights": Target(lambda data: apply_patch(weights, data), [patch]),
        "frame": Target(_frame, [*packed, frames.encode_relay("j/w0", "j/w1", b"x")]),
        "envelope": Target(_body, [one[frames.HEADER_BYTES :] for one in packed]),
        "command of a node": Target(unpack_command, [pack_command(launch)]),
        "tensor chunk": Target(_view(unpack_chunk), [chunk]),
        "spec of a codec": Target(_code_spec, [row.example.encode() for row in CODECS.values()]),
        "all-to-all, outgoing": Target(
            lambda data: open_outgoing("w0", data, weight=1.0, members=["w0", "w1"]),
            [bytes([0, 0, 0, 3, 0x91, 0x90, 0xC0, 0])],
        ),
        "all-to-all, direct": Target(
            lambda data: open_direct("w0", data), [bytes([0, 0, 0, 3, 0x91, 0x90, 0xC0, 0])]
        ),
        "all-to-all, bundle": Target(
            lambda data: open_bundle(data, me="w0", members=["w0", "w1"]), [bytes(8)]
        ),
        "parameter server's frame": Target(_view(unpack_frame), [server]),
        "parameter server's ask": Target(unpack_server_ask, [b"\x81\xa4type\xa4load"]),
        "parameter server's answer": Target(unpack_server_answer, [b"\x80"]),
        "piece between members": Target(_view(unpack_piece), [bytes(12)]),
        "swarm's head": Target(swarm.unpack_head, [b"\x80"]),
        "ask for a state": Target(
            _view(unpack_ask), [b"".join(map(bytes, pack_ask(ask)))]
        ),
        "answer about a state": Target(
            _view(unpack_answer), [b"".join(map(bytes, pack_answer(answer)))]
        ),
        "path of a state": Target(_text(ask_of), [path_of(ask).encode()]),
        "manifest of a state": Target(decode_state_manifest, [encode_state_manifest(state)]),
        "manifest of a checkpoint": Target(decode_manifest, [b'{"version":1}']),
        "header of a checkpoint": Target(
            lambda data: read_header(io.BytesIO(data), nbytes=len(data), name="x"),
            [len(header).to_bytes(8, "little") + header + bytes(4)],
        ),
        "value in a queue": Target(serialization.decode, [value, tensors]),
        "point of a pairing": Target(decoded, [b"\x04" + bytes(64)]),
        "pairing code": Target(_text(read_code), [b"123 456"]),
        "ticket": Target(_text(parse_ticket), [b"atoll://h:1/s~tls", b"atoll://[::1]:7700/p/s"]),
        "job file": Target(
            _text(parse_spec),
            [SPEC.encode(), TRAINER.format(
                name="a", nodes=1, on="[]", text="x", steps=1).encode()],
        ),
        "pack of code": Target(code, [code.good]),
    }  # fmt: skip
    for name, row in CODECS.items():
        with contextlib.suppress(AtollError):  # some need shapes, and decode as their parts do
            found[f"codec {name}"] = _codec(row.example)
    return found
