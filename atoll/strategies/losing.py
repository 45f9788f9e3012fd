"""Updates that are lost on purpose: by a shared seed, so that all members know whose."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from atoll.errors import ConfigError


def check_probability(probability: float) -> float:
    """Return the probability if updates can be lost with it.

    Raises:
        ConfigError: it is not in 0 <= p < 1.
    """
    if not 0 <= probability < 1:
        raise ConfigError(
            "updates cannot be lost with this probability",
            given=f"drop = {probability}",
            expected="0 up to below 1",
        )
    return probability


def lost_updates(
    members: Sequence[str], *, round_: int, probability: float, seed: int
) -> frozenset[str]:
    """Return whose updates are lost in a round: the same on every member.

    Each member's draw depends on nothing but its name, the round and the seed. A round in which all
    would be lost loses none, for there would be no mean.
    """
    lost = {name for name in members if _draw(name, round_=round_, seed=seed) < probability}
    return frozenset(lost if len(lost) < len(members) else ())


def _draw(member: str, *, round_: int, seed: int) -> float:
    """Return a number, uniform in 0 up to below 1."""
    text = f"{seed} {round_} {member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
