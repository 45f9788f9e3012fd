"""Messages between a donor of the committed state and a member that recovers it.

The state is two *images*: `shared`, equal on every member of a round, and `inner`, the donor's own.
An image is cut into chunks of `CHUNK_BYTES`; its manifest has the digest of every chunk, so that
chunks from different donors can be verified one by one. Both routes use the same messages:

  relayed   4 bytes `ASKS` or `ANSWERS`, 2 bytes length, msgpack `StateAsk` or `StateAnswer`, body
  direct    GET /KIND/ROUND/IMAGE/FIRST/COUNT; on success the body alone, else the answer

The first byte distinguishes them from tensor chunks: as a head length it would exceed any head.
"""

from __future__ import annotations

import struct

import msgspec

from atoll.digest import DIGEST_BYTES, Digest
from atoll.errors import FrameTooLarge, WireError
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

ASKS = b"\xff\xffS?"
ANSWERS = b"\xff\xffS!"

SHARED, INNER = "shared", "inner"
"""Names of the two images."""

OFFER, MANIFEST, CHUNK = "offer", "manifest", "chunk"
"""What can be requested."""

OK, WAIT, GONE, REFUSED = "ok", "wait", "gone", "refused"
"""Outcomes. `wait`: ask again soon; `gone`: the donor holds another round."""

MAX_MANIFEST_BYTES = 16 * 2**20
"""Of one encoded manifest: the digests of an image of 256 GiB."""

MAX_RANGE = 16
"""Most chunks in one ask: 4 MiB."""

_LENGTH = struct.Struct("!H")


class StateManifest(msgspec.Struct, frozen=True, array_like=True):
    """Size and chunk digests of one image."""

    job: str
    round: int
    base: str
    """Digest of the committed state, as in `RoundJoin`."""
    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes
    """Digest of every chunk, `DIGEST_BYTES` each, concatenated."""

    @property
    def root(self) -> str:
        """Digest of the manifest: equal for equal images of the same round and job."""
        return Digest(encode_state_manifest(self)).hexdigest()

    @property
    def count(self) -> int:
        """Number of chunks."""
        return count_chunks(self.nbytes)

    def size_of(self, index: int) -> int:
        """Return the bytes of one chunk."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)

    def fits(self, index: int, chunk: Buffer) -> bool:
        """Return whether a chunk has the right digest. Hashing releases the GIL."""
        return chunk_digest(chunk) == self.digest_of(index)

    def digest_of(self, index: int) -> bytes:
        """Return the digest of one chunk."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


class ImageOffer(msgspec.Struct, frozen=True, array_like=True):
    """One image that a donor can serve."""

    name: str
    nbytes: int
    root: str
    """Of its manifest."""
    manifest_bytes: int
    """Of its encoded manifest."""


class StateAsk(msgspec.Struct, frozen=True, array_like=True):
    """One request of a recovering member."""

    number: int
    """Repeated in the answer."""
    kind: str
    round: int
    image: str = ""
    first: int = 0
    """First chunk; if a manifest is requested, chunk of the encoded manifest."""
    count: int = 1


class StateAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Precedes the requested bytes, or reports why there are none."""

    number: int
    status: str
    round: int
    """Round that the donor holds; -1: none yet."""
    image: str = ""
    index: int = 0
    """Of the chunk in the body; relayed chunks are sent one by one."""
    base: str = ""
    key: str = ""
    """Access key of the donor's port; sent only to members of the job."""
    images: list[ImageOffer] = []
    reason: str = ""
    identical: bool = True
    """Whether every member holds this state; if not, all of it MUST come from one donor."""
    fingerprint: str = ""
    """SHA-256 of the public key of the donor's port, which speaks TLS; empty: it does not."""


_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(StateAsk)
_answers = msgspec.msgpack.Decoder(StateAnswer)
_manifests = msgspec.msgpack.Decoder(StateManifest)


def chunk_digest(chunk: Buffer) -> bytes:
    """Return the digest of a chunk."""
    return Digest(chunk).digest()


def count_chunks(nbytes: int) -> int:
    """Return the number of chunks of so many bytes."""
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
    """Return a manifest as bytes; the encoding is deterministic."""
    return _encoder.encode(manifest)


def decode_state_manifest(data: Buffer) -> StateManifest:
    """Parse and check an untrusted manifest; raises WireError if it is inconsistent."""
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
    """Parse the ask in a relay frame's payload; raises WireError if it is malformed."""
    head, _ = _unpacked(ASKS, payload)
    try:
        return _asks.decode(head)
    except MALFORMED as error:
        raise WireError("an ask for the state is malformed", given=str(error)) from error


def pack_answer(answer: StateAnswer, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return the parts of a relay frame; raises FrameTooLarge if the answer is too long."""
    return _packed(ANSWERS, _encoder.encode(answer)), body


def unpack_answer(payload: memoryview) -> tuple[StateAnswer, memoryview]:
    """Parse a relay frame's payload into answer and body; raises WireError if it is malformed."""
    head, body = _unpacked(ANSWERS, payload)
    return decode_answer(head), body


def encode_answer(answer: StateAnswer) -> bytes:
    """Return an answer as the body of an HTTP response."""
    return _encoder.encode(answer)


def decode_answer(data: Buffer) -> StateAnswer:
    """Parse an untrusted answer; raises WireError if it is malformed."""
    try:
        return _answers.decode(data)
    except MALFORMED as error:
        raise WireError("an answer about the state is malformed", given=str(error)) from error


def path_of(ask: StateAsk) -> str:
    """Return the HTTP path that is equivalent to an ask."""
    return f"/{ask.kind}/{ask.round}/{ask.image or '-'}/{ask.first}/{ask.count}"


def ask_of(path: str) -> StateAsk:
    """Parse an HTTP path; raises WireError if it is malformed."""
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
        raise WireError("this is not a message about the state", given=bytes(payload[:16]).hex())
    end = start + _LENGTH.unpack_from(payload, len(prefix))[0]
    if end > payload.nbytes:
        raise WireError("a message about the state is cut short", given=f"{payload.nbytes} bytes")
    return payload[start:end], payload[end:]
