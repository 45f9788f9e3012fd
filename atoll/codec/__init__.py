"""Codecs: encode flat float32 vectors into fewer bytes, at a known cost in precision.

May import errors, digest and methods. Start reading at `base.py` (the interface), then
`registry.py` (how a spec becomes a codec).
"""

from atoll.codec.base import Codec, Packet
from atoll.codec.registry import base_spec, make_codec

__all__ = ["Codec", "Packet", "base_spec", "make_codec"]
