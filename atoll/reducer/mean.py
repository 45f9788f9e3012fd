"""The weighted mean of encoded vectors, with the same arithmetic on every route.

The sum runs in fp32 in member order, so the same contributions give the same bits on every machine.
The divisor is the weight received, never the number of members of the job.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.digest import Digest
from atoll.errors import AtollError, GroupError, LossNotFinite, WireError
from atoll.wire.frames import Buffer
from atoll.wire.messages import RoundPlan

MAX_WEIGHT = 1e15
"""Largest weight of a contribution (weights count tokens); keeps sums far from overflow."""


LARGE = 100.0
"""A mean with no larger value than this is not searched for outliers."""
FAR = 1e4
"""A member's largest value may be this many times the median of the members' largest values."""
ABSURD = 1e12
"""The limit if that median is zero."""


@dataclass(frozen=True, slots=True)
class Share:
    """One member's complete contribution, still encoded."""

    member: str
    packet: Packet
    weight: float
    contributors: tuple[str, ...] | None = None
    """Members that contributed, if this member sends for its site; None: itself."""
    aggregation: str = ""
    """How values are aggregated, see :mod:`atoll.reducer.aggregation`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Members that contributed to it."""
        return (self.member,) if self.contributors is None else self.contributors


@dataclass(frozen=True, slots=True)
class Averaged:
    """A weighted mean before encoding."""

    vector: Tensor
    contributors: tuple[str, ...]
    weight: float
    left_out: dict[str, AtollError] = field(default_factory=dict)
    """Members left out of this mean, with the reason."""
    refused: dict[str, AtollError] = field(default_factory=dict)
    """Evicted members, with the reason."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, encoded."""

    packet: Packet
    """Encoded once: all members decode the same bytes."""
    contributors: tuple[str, ...]
    weight: float
    left_out: dict[str, AtollError] = field(default_factory=dict)
    """Members left out (not finite, too large for the sum, or not admitted), with the reason."""
    refused: dict[str, AtollError] = field(default_factory=dict)
    """Evicted members, with the reason."""


def minority(shares: Sequence[Share]) -> dict[str, AtollError]:
    """Return an error for every member with another codec, sizes or aggregation than the majority.

    On a tie the first member in order prevails.
    """
    kinds = [(share.packet.codec, tuple(share.packet.sizes), share.aggregation) for share in shares]
    if len(set(kinds)) <= 1:
        return {}
    right = max(kinds, key=Counter(kinds).__getitem__)
    return {
        share.member: GroupError(
            "this member's contribution does not fit the others'",
            given=f"{share.member} sent {_describe(*kind)}",
            expected=_describe(*right),
            remedy="start every member with the same job file and the same model",
        )
        for share, kind in zip(shares, kinds, strict=True)
        if kind != right
    }


def _describe(codec: str, sizes: Sequence[int], aggregation: str) -> str:
    rule = f", aggregation {aggregation}" if aggregation else ""
    return f"codec {codec}, {len(sizes)} tensors with {sum(sizes)} elements{rule}"


def mean_of(shares: Sequence[Share], *, codec: Codec) -> Mean:
    """Return the encoded weighted mean of compatible contributions; see :func:`average`."""
    return encoded(average(shares, codec=codec), shares, codec=codec)


def encoded(averaged: Averaged, shares: Sequence[Share], *, codec: Codec) -> Mean:
    """Encode an aggregate in the format of the contributions (without feedback)."""
    coder = codec.base.mean_codec(shares[0].packet)
    packet = coder.encode(averaged.vector, key="mean")
    return Mean(
        replace(packet, sizes=tuple(shares[0].packet.sizes)), averaged.contributors,
        averaged.weight, averaged.left_out, averaged.refused,
    )  # fmt: skip


def average(shares: Sequence[Share], *, codec: Codec) -> Averaged:
    """Return the weighted mean of compatible contributions, given in member order.

    Contributions that are not finite, too large for a sum in fp32, or more than `FAR` times
    the median are left out and named: one broken machine must not end a run. That is no defence
    against an attacker who stays below the limit; see :mod:`atoll.reducer.aggregation`.

    Raises:
        GroupError: no contribution is usable, or the weights add up to 0.
    """
    left_out = {s.member: bad_weight(s) for s in shares if not is_weight(s.weight)}
    usable = [share for share in shares if share.member not in left_out]
    total = total_weight(usable, left_out)
    vector = _weighted_sum(usable, codec)
    if not is_finite(vector):
        left_out |= _guilty(usable, codec)
        usable = [share for share in usable if share.member not in left_out]
        total = total_weight(usable, left_out)
        vector = _weighted_sum(usable, codec)
    if largest_of(vector) > LARGE and (far := _far(usable, codec)):
        left_out |= far
        usable = [share for share in usable if share.member not in left_out]
        total = total_weight(usable, left_out)
        vector = _weighted_sum(usable, codec)
    names = tuple(name for share in usable for name in share.names)
    return Averaged(vector, names, total, left_out)


def weighed(shares: Sequence[Share], plan: RoundPlan, *, refused: Container[str]) -> list[Share]:
    """Return the contributions that are not refused; those of unweighted members get weight 0.

    If no others are left, the unweighted members keep their declared weights.
    """
    left = [share for share in shares if share.member not in refused]
    if all(share.member in plan.unweighted for share in left):
        return left
    return [
        replace(share, weight=0.0) if share.member in plan.unweighted else share for share in left
    ]


def total_weight(shares: Sequence[Share], left_out: dict[str, AtollError]) -> float:
    """Return the sum of weights; raises GroupError if it is 0."""
    total = math.fsum(share.weight for share in shares)
    if total > 0:
        return total
    raise GroupError(
        "there is nothing to average",
        given=f"{len(shares)} contributions of weight 0"
        + "".join(f", {member}: {error.what}" for member, error in left_out.items()),
        expected="at least one finite contribution with a weight above 0",
    )


def _weighted_sum(shares: Sequence[Share], codec: Codec) -> Tensor:
    """Return the weighted mean, decoding one contribution at a time into one vector."""
    weighty = [share for share in shares if share.weight > 0]
    factors, divisor = mean_factors([share.weight for share in weighty])
    vector = torch.zeros(shares[0].packet.num_elements)
    for share, factor in zip(weighty, factors, strict=True):
        codec.base.decode_add(share.packet, out=vector, weight=factor)
    return vector.div_(divisor) if divisor != 1.0 else vector


def mean_factors(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return each contribution's factor, and the divisor of their sum.

    Equal weights become 1, so that the mean of equal vectors is bitwise that vector.
    """
    if len(set(weights)) == 1:
        return [1.0] * len(weights), float(len(weights))
    return list(weights), math.fsum(weights)


def is_finite(vector: Tensor) -> bool:
    """Return whether every value is finite, in one pass and without a temporary."""
    return math.isfinite(largest_of(vector))


def largest_of(vector: Tensor) -> float:
    """Return the largest absolute value in one pass and without a temporary; NaN if one is NaN."""
    if vector.numel() == 0:
        return 0.0
    low, high = (abs(value.item()) for value in torch.aminmax(vector))
    return low + high if math.isnan(low + high) else max(low, high)


def is_weight(weight: float) -> bool:
    """Return whether a weight is finite, not negative, and at most `MAX_WEIGHT`."""
    return math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT


def bad_weight(share: Share) -> AtollError:
    """Return the error for an unusable weight."""
    return GroupError(
        "a weight is not usable",
        given=f"{share.weight} from {share.member}", expected=f"0 to {MAX_WEIGHT:.0e}",
    )  # fmt: skip


def _guilty(shares: Sequence[Share], codec: Codec) -> dict[str, AtollError]:
    """Return the members that keep the weighted sum from being finite, with the reason."""
    weighty = [share for share in shares if share.weight > 0]
    factors, _ = mean_factors([share.weight for share in weighty])
    found: dict[str, AtollError] = {}
    for share, factor in zip(weighty, factors, strict=True):
        largest = _largest(share, codec)
        if not math.isfinite(largest):
            found[share.member] = not_finite(share)
        elif largest * factor > torch.finfo(torch.float32).max / len(weighty):
            found[share.member] = GroupError(
                "a contribution is larger than fp32 can hold the sum of",
                given=f"{largest:.3g} with weight {share.weight:g} from {share.member}",
                expected="smaller values; it was left out of the mean",
                remedy="lower the learning rate, or switch clipping on",
            )
    return found


def _far(shares: Sequence[Share], codec: Codec) -> dict[str, AtollError]:
    """Return the members with a largest value far above the median of all, with the reason."""
    weighty = [share for share in shares if share.weight > 0]
    if len(weighty) < 2:
        return {}
    largest = {share.member: _largest(share, codec) for share in weighty}
    middle = statistics.median_low(largest.values())
    limit = FAR * middle if middle > 0 else ABSURD
    return {
        member: GroupError(
            "a contribution is far larger than the others'",
            given=f"{value:.3g} from {member}",
            expected=f"at most {limit:.3g}, {FAR:.0e} times the middle member's; it was left out",
            remedy="look at that machine's loss and memory, or lower the learning rate",
        )
        for member, value in largest.items()
        if value > max(limit, LARGE)
    }


def unreadable(shares: Sequence[Share], codec: Codec) -> dict[str, AtollError]:
    """Return the members whose packets cannot be decoded, with the reason."""
    found: dict[str, AtollError] = {}
    for share in shares:
        try:
            codec.base.decode(share.packet)
        except AtollError as error:
            found[share.member] = error
        except Exception as error:  # a member's bytes must not end the round of the others
            found[share.member] = WireError("a packet cannot be decoded", given=repr(error))
    return found


def not_finite(share: Share) -> AtollError:
    """Return the error for values that are NaN or infinite."""
    return LossNotFinite(
        "a contribution has values that are NaN or infinite", given=f"from {share.member}",
        expected="finite values; it was left out of the mean",
        remedy="lower the learning rate, or switch clipping on",
    )  # fmt: skip


def _largest(share: Share, codec: Codec) -> float:
    """Return the largest absolute value; infinite if a value is not finite."""
    try:
        vector = codec.base.decode(share.packet)
    except WireError:
        return math.inf
    largest = largest_of(vector)
    return largest if math.isfinite(largest) else math.inf


def result_digest(data: Buffer | Iterable[Buffer], contributors: Sequence[str]) -> str:
    """Return 32 hex digits over result and names, compared by members before they commit."""
    digest = Digest()
    for part in [data] if isinstance(data, bytes | bytearray | memoryview) else data:
        digest.update(part)
    digest.update("\0".join(contributors).encode())
    return digest.hexdigest()
