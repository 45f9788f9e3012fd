"""Codecs: what a vector weighs on the wire, and what that costs in precision."""

from atoll.codec.base import Codec, Packet
from atoll.codec.registry import base_spec, make_codec

__all__ = ["Codec", "Packet", "base_spec", "make_codec"]
