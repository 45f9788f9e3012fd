"""Estimated time of a codec's encoding, transfer and decoding, for choosing one by link speed."""

from __future__ import annotations

from atoll.methods.codecs import CODECS, CodecRow

UNKNOWN = CodecRow(name="", implementation="", example="", line="", good_for="")
"""Used for codecs not in the table: the speeds of a slow codec."""


def seconds(spec: str, *, elements: int, nbytes: int, bytes_per_s: float) -> float:
    """Return a member's time for one mean: encode, send, receive the mean, decode.

    The reducer works while others transfer, so its share is counted for one vector. `nbytes` is the
    size of a packet, `bytes_per_s` the bandwidth in one direction.
    """
    row = CODECS.get(spec.partition(":")[0], UNKNOWN)
    coding = 1 / row.encode_bytes_per_s + 1 / row.decode_bytes_per_s
    return 2 * 4 * elements * coding + 2 * nbytes / bytes_per_s
