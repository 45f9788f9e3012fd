"""A codec's state inside that of a strategy: what is a member's own, and what all share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from atoll.codec.codec import Codec

_OWN, _SHARED = "own.codec.", "shared.codec."
_EQUAL = "shared."
"""Begins the names in a codec's state that are equal on all members after a round."""


def codec_state(codec: Codec) -> dict[str, Tensor]:
    """Return a codec's state under `own.codec.*` and `shared.codec.*`, for a strategy's own."""
    return {
        _SHARED + name.removeprefix(_EQUAL) if name.startswith(_EQUAL) else _OWN + name: value
        for name, value in codec.state_dict().items()
    }


def load_codec_state(codec: Codec, state: Mapping[str, Tensor]) -> None:
    """Give a codec its part of a strategy's state; a newcomer has only what is shared."""
    own = {k.removeprefix(_OWN): v for k, v in state.items() if k.startswith(_OWN)}
    shared = {
        _EQUAL + k.removeprefix(_SHARED): v for k, v in state.items() if k.startswith(_SHARED)
    }
    codec.load_state_dict(own | shared)
