"""What a member that has the committed state and one that lacks it say to each other.

The state is two *images*: `shared`, equal on every member of a round, and `inner`, the donor's own.
An image is cut into chunks of `CHUNK_BYTES`; its manifest has the digest of every chunk, so that
each is checked by itself, whoever sent it. Ask and answer are the same on both ways:

    relayed   4 bytes `ASKS` or `ANSWERS`, 2 bytes length, msgpack `StateAsk` or `StateAnswer`, body
    direct    GET /KIND/ROUND/IMAGE/FIRST/COUNT; the body alone if all is well, else the answer

The first byte tells relayed ones from pieces of a reduce: read as such they have a head that is
longer than any.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from atoll.errors import FrameTooLarge, WireError
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

ASKS = b"\xff\xffS?"
ANSWERS = b"\xff\xffS!"

SHARED, INNER = "shared", "inner"
"""Names of the two images."""

OFFER, MANIFEST, CHUNK = "offer", "manifest", "chunk"
"""What can be asked for."""

OK, WAIT, GONE, REFUSED = "ok", "wait", "gone", "refused"
"""How it is answered. `wait`: ask again soon; `gone`: the donor stands on another round."""

DIGEST_BYTES = 16
MAX_MANIFEST_BYTES = 16 * 2**20
"""Of one encoded manifest: the digests of an image of 256 GiB."""

MAX_RANGE = 16
"""Most chunks in one ask: 4 MiB."""

_LENGTH = struct.Struct("!H")


class StateManifest(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of one image must be."""

    job: str
    round: int
    base: str
    """Digest of the committed state, as rounds are joined with."""
    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes
    """BLAKE2b of every chunk, 16 bytes each, one behind the other."""

    @property
    def root(self) -> str:
        """Digest of everything in it: equal for equal images of the same round and job."""
        return hashlib.blake2b(encode_state_manifest(self), digest_size=DIGEST_BYTES).hexdigest()

    @property
    def count(self) -> int:
        """Number of chunks."""
        return count_chunks(self.nbytes)

    def size_of(self, index: int) -> int:
        """Return the bytes of one chunk."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)

    def fits(self, index: int, chunk: Buffer) -> bool:
        """Return whether a chunk is what it must be. Leaves the interpreter to others."""
        start = index * DIGEST_BYTES
        return chunk_digest(chunk) == self.digests[start : start + DIGEST_BYTES]


class ImageOffer(msgspec.Struct, frozen=True, array_like=True):
    """One image that a donor has ready."""

    name: str
    nbytes: int
    root: str
    """Of its manifest."""
    manifest_bytes: int
    """Of its encoded manifest."""


class StateAsk(msgspec.Struct, frozen=True, array_like=True):
    """One wish of a member that lacks the state."""

    number: int
    """Comes back with the answer."""
    kind: str
    round: int
    image: str = ""
    first: int = 0
    """First chunk; of the encoded manifest in asks for that."""
    count: int = 1


class StateAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes that were asked for, or instead of them."""

    number: int
    status: str
    round: int
    """Where the donor stands; -1: nowhere yet."""
    image: str = ""
    index: int = 0
    """Of the chunk behind it; relayed chunks come one by one."""
    base: str = ""
    key: str = ""
    """What opens the donor's own port; told to members of the job only."""
    images: list[ImageOffer] = []
    reason: str = ""
    identical: bool = True
    """Whether every member has this very state; if not, one donor has to give all of it."""


_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(StateAsk)
_answers = msgspec.msgpack.Decoder(StateAnswer)
_manifests = msgspec.msgpack.Decoder(StateManifest)


def chunk_digest(chunk: Buffer) -> bytes:
    """Return the digest of a chunk."""
    return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest()


def count_chunks(nbytes: int) -> int:
    """Return into how many chunks bytes are cut."""
    return -(-nbytes // CHUNK_BYTES)


def state_manifest(
    view: memoryview, *, job: str, round_: int, base: str, name: str
) -> StateManifest:
    """Return the manifest of an image."""
    digests = b"".join(
        chunk_digest(view[start : start + CHUNK_BYTES])
        for start in range(0, view.nbytes, CHUNK_BYTES)
    )
    return StateManifest(job, round_, base, name, view.nbytes, CHUNK_BYTES, digests)


def encode_state_manifest(manifest: StateManifest) -> bytes:
    """Return a manifest as bytes; equal ones give equal bytes."""
    return _encoder.encode(manifest)


def decode_state_manifest(data: Buffer) -> StateManifest:
    """Return the manifest in bytes of a stranger, after checking that its numbers agree.

    Raises:
        WireError: it is malformed, or contradicts itself.
    """
    try:
        manifest = _manifests.decode(data)
    except MALFORMED as error:
        raise WireError("the manifest of a state is malformed", given=str(error)) from error
    right = (
        manifest.chunk_bytes == CHUNK_BYTES
        and manifest.nbytes > 0
        and len(manifest.digests) == manifest.count * DIGEST_BYTES
    )
    if not right:
        raise WireError(
            "the manifest of a state contradicts itself",
            given=f"{manifest.nbytes} bytes in chunks of {manifest.chunk_bytes}, "
            f"{len(manifest.digests)} bytes of digests",
            expected=f"chunks of {CHUNK_BYTES} bytes with {DIGEST_BYTES} bytes of digest each",
        )
    return manifest


def pack_ask(ask: StateAsk) -> tuple[bytes, Buffer]:
    """Return an ask as the parts of a relay frame."""
    return _packed(ASKS, _encoder.encode(ask)), b""


def unpack_ask(payload: memoryview) -> StateAsk:
    """Return the ask in a relay frame's payload.

    Raises:
        WireError: it is none.
    """
    head, _ = _unpacked(ASKS, payload)
    try:
        return _asks.decode(head)
    except MALFORMED as error:
        raise WireError("an ask for the state is malformed", given=str(error)) from error


def pack_answer(answer: StateAnswer, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return an answer and its body as the parts of a relay frame.

    Raises:
        FrameTooLarge: the answer is too long.
    """
    return _packed(ANSWERS, _encoder.encode(answer)), body


def unpack_answer(payload: memoryview) -> tuple[StateAnswer, memoryview]:
    """Return answer and body in a relay frame's payload.

    Raises:
        WireError: it is none.
    """
    head, body = _unpacked(ANSWERS, payload)
    return decode_answer(head), body


def encode_answer(answer: StateAnswer) -> bytes:
    """Return an answer as a body of its own."""
    return _encoder.encode(answer)


def decode_answer(data: Buffer) -> StateAnswer:
    """Return the answer in bytes of a stranger.

    Raises:
        WireError: it is none.
    """
    try:
        return _answers.decode(data)
    except MALFORMED as error:
        raise WireError("an answer about the state is malformed", given=str(error)) from error


def path_of(ask: StateAsk) -> str:
    """Return the path that asks for the same on the donor's own port."""
    return f"/{ask.kind}/{ask.round}/{ask.image or '-'}/{ask.first}/{ask.count}"


def ask_of(path: str) -> StateAsk:
    """Return the ask in a path.

    Raises:
        WireError: it is none.
    """
    try:
        empty, kind, round_, image, first, count = path.split("/")
        if empty or max(len(round_), len(first), len(count)) > 18:
            raise ValueError(path[:100])
        image = "" if image == "-" else image
        return StateAsk(0, kind, int(round_), image, int(first), int(count))
    except ValueError as error:
        raise WireError("an ask for the state is malformed", given=str(error)) from error


def _packed(prefix: bytes, head: bytes) -> bytes:
    if len(head) > 0xFFFF:
        raise FrameTooLarge(
            "a message about the state is too large",
            given=f"{len(head)} bytes",
            expected=f"at most {0xFFFF} bytes",
        )
    return prefix + _LENGTH.pack(len(head)) + head


def _unpacked(prefix: bytes, payload: memoryview) -> tuple[memoryview, memoryview]:
    start = len(prefix) + _LENGTH.size
    if payload[: len(prefix)] != prefix or payload.nbytes < start:
        raise WireError("this is no message about the state", given=bytes(payload[:16]).hex())
    end = start + _LENGTH.unpack_from(payload, len(prefix))[0]
    if end > payload.nbytes:
        raise WireError("a message about the state is cut short", given=f"{payload.nbytes} bytes")
    return payload[start:end], payload[end:]
