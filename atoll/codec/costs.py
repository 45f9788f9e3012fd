"""What a codec's arithmetic costs, for choosing one by the speed of the link."""

from __future__ import annotations

from atoll.methods.codecs import CODECS, CodecRow

UNKNOWN = CodecRow(name="", implementation="", example="", line="", good_for="")
"""Has the speeds of a slow codec."""


def seconds(spec: str, *, elements: int, nbytes: int, bytes_per_s: float) -> float:
    """Return how long one mean takes a member: encode, send, wait for the mean, decode.

    The place that adds up decodes and encodes too, beside the transfer of others; its share of
    one member's vector is counted once.

    Args:
        spec: Of the codec.
        elements: Of the vector.
        nbytes: Of a packet.
        bytes_per_s: Of the link, one way.
    """
    row = CODECS.get(spec.partition(":")[0], UNKNOWN)
    coding = 1 / row.encode_bytes_per_s + 1 / row.decode_bytes_per_s
    return 2 * 4 * elements * coding + 2 * nbytes / bytes_per_s
