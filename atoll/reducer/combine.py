"""Combines contributions into one vector, by the aggregation sent with them.

Used by the reducer, by members in one process, and by the owner of a chunk on the direct route.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import AtollError, GroupError, PeerRefused
from atoll.reducer.admission import Candidate, admit, evictions
from atoll.reducer.aggregation import Rule, VectorAggregation, fitted, parse_aggregation
from atoll.reducer.block_view import BlockView
from atoll.reducer.buckets import Bucketed, buckets_of
from atoll.reducer.mean import (
    Averaged,
    Mean,
    Share,
    average,
    bad_weight,
    encoded,
    is_finite,
    is_weight,
    not_finite,
    total_weight,
    unreadable,
)
from atoll.reducer.norm_history import History, NormHistory
from atoll.reducer.rules.clipping import centred_clipping
from atoll.reducer.rules.distances import squared_distances
from atoll.reducer.rules.geometric import geometric_median
from atoll.reducer.rules.krum import krum
from atoll.reducer.rules.order import median, trimmed_mean

__all__ = ["NormHistory", "averaged", "combine", "combine_readable"]

FAR = 1000.0
"""Longer contributions are shortened to this many times the median norm before distances are taken:
beside a norm of 1e30, rounding would leave no digits of the other distances."""


def combine(
    shares: Sequence[Share],
    *,
    codec: Codec,
    aggregation: str = "",
    memory: NormHistory | None = None,
    round_: int = 0,
) -> Mean:
    """Return the aggregate of compatible contributions, encoded (without feedback).

    The `shares`, in member order, MUST have one codec, size and aggregation. An empty one
    is the plain mean, bitwise equal to :func:`mean_of`. `memory` is None where no history is kept.

    Raises:
        GroupError: nothing is usable, or the aggregation needs a memory.
        PeerLost: the rule needs more contributions.
        PeerRefused: more than a third was rejected, or the result is not finite.
    """
    found = averaged(shares, codec=codec, aggregation=aggregation, memory=memory, round_=round_)
    return encoded(found, shares, codec=codec)


def combine_readable(
    shares: Sequence[Share], *, memory: NormHistory | None, round_: int
) -> tuple[Mean | None, dict[str, AtollError]]:
    """Return the aggregate, and the members whose packets cannot be decoded, with the reason.

    None: no other members are left. Raises as :func:`combine`.
    """
    codec, how = make_codec(shares[0].packet.codec), shares[0].aggregation
    try:
        return combine(shares, codec=codec, aggregation=how, memory=memory, round_=round_), {}
    except GroupError:
        raise
    except Exception:
        damaged = unreadable(shares, codec)
        if not damaged:
            raise
    rest = [share for share in shares if share.member not in damaged]
    if not rest:
        return None, damaged
    return combine(rest, codec=codec, aggregation=how, memory=memory, round_=round_), damaged


def averaged(
    shares: Sequence[Share],
    *,
    codec: Codec,
    aggregation: str = "",
    memory: NormHistory | None = None,
    round_: int = 0,
) -> Averaged:
    """Return the aggregate that :func:`combine` encodes."""
    if not aggregation:
        return average(shares, codec=codec)
    wanted = parse_aggregation(aggregation)
    history = _history(wanted, aggregation, memory, round_)
    refused = evictions([share.member for share in shares], history)
    shares = [share for share in shares if share.member not in refused]
    let_in = _let_in(shares, codec, wanted, history, round_)
    vector = _aggregate(let_in, codec, history, seed=f"{round_}/{wanted.key}")
    if not is_finite(vector):
        raise PeerRefused(
            "the aggregate of the members' values is not finite", given=f"aggregate {aggregation}",
            expected="smaller values", remedy="lower the learning rate, or switch clipping on",
        )  # fmt: skip
    if memory is not None:
        after = let_in.history
        if wanted.aggregate.name == "clip":
            after = replace(after, aggregate=vector)
        memory.note(aggregation, round_, after)
    idle = [share for share in shares if share.weight == 0.0]
    present = {share.member for share in [*let_in.shares, *idle]}
    names = tuple(name for share in shares if share.member in present for name in share.names)
    weight = math.fsum(let_in.weights)
    return Averaged(vector, names, weight, dict(let_in.left_out), refused)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Contributions with a weight above 0 that are combined."""

    rule: Rule
    """The aggregate, fitted to their number."""
    shares: list[Share]
    norms: list[float]
    """After scaling."""
    scales: list[float]
    weights: list[float]
    left_out: Mapping[str, AtollError]
    history: History


def _history(
    aggregation: VectorAggregation, text: str, memory: NormHistory | None, round_: int
) -> History:
    remembers = aggregation.aggregate.name == "clip" or aggregation.admission.name != "finite"
    if memory is None and remembers:
        raise GroupError(
            "this aggregation needs the reducer: it sees all contributions and keeps state",
            given=text,
            expected="the relay route", remedy='route = "auto" or "relay" in [job]',
        )  # fmt: skip
    return memory.before(text, round_) if memory is not None else History()


def _let_in(
    shares: Sequence[Share],
    codec: Codec,
    aggregation: VectorAggregation,
    history: History,
    round_: int,
) -> _Admitted:
    left_out = {s.member: bad_weight(s) for s in shares if not is_weight(s.weight)}
    weighty = [s for s in shares if s.member not in left_out and s.weight > 0.0]
    total_weight(weighty, left_out)
    norms = dict(zip((s.member for s in weighty), BlockView(weighty, codec).norms(), strict=True))
    left_out |= {s.member: not_finite(s) for s in weighty if not math.isfinite(norms[s.member])}
    weighty = [s for s in weighty if s.member not in left_out]
    scales, weights = {s.member: 1.0 for s in weighty}, {s.member: s.weight for s in weighty}
    if aggregation.admission.name == "norms":
        admitted = admit(
            [Candidate(s.member, norms[s.member], s.weight) for s in weighty], left_out,
            rule=aggregation.admission, history=history, round_=round_,
        )  # fmt: skip
        scales, weights = dict(admitted.scales), dict(admitted.weights)
        left_out, history = dict(admitted.rejected), admitted.history
        weighty = [s for s in weighty if s.member in scales]
    total_weight(weighty, left_out)
    return _Admitted(
        rule=fitted(aggregation.aggregate, len(weighty), found=len(left_out)),
        shares=weighty,
        norms=[norms[s.member] * scales[s.member] for s in weighty],
        scales=[scales[s.member] for s in weighty],
        weights=[weights[s.member] for s in weighty],
        left_out=left_out,
        history=history,
    )


def _aggregate(let_in: _Admitted, codec: Codec, history: History, *, seed: str) -> Tensor:
    """Return the aggregate, (P,); `seed` determines the buckets."""
    rule, name = let_in.rule, let_in.rule.name
    if name in ("mean", "sum"):
        mean = _mean(let_in, codec)
        members = sum(len(share.names) for share in let_in.shares)
        return mean.mul_(members) if name == "sum" else mean
    if name in ("median", "trimmed"):
        trimmed = partial(trimmed_mean, bad=int(rule.number(0, 0)))
        rows = _rows(let_in, codec, let_in.scales, seed=seed)
        return _by_coordinate(rows, median if name == "median" else trimmed)
    middle = median_low(let_in.norms)
    far = FAR * middle if middle > 0.0 else math.inf
    scales = [
        scale * (far / norm if norm > far else 1.0)
        for scale, norm in zip(let_in.scales, let_in.norms, strict=True)
    ]
    rows = _rows(let_in, codec, scales, seed=seed)
    if name == "clip":
        return _clipped(rows, rule, history)
    squares = squared_distances(rows)
    if name == "geometric-median":
        return rows.combination(geometric_median(squares))
    bad = int(rule.number(0, 0))
    best = int(rule.number(1, len(rows) - bad)) if name == "multi-krum" else 1
    return rows.combination(krum(squares, bad=bad, best=best, ties=rows.digests()))


def _rows(
    let_in: _Admitted, codec: Codec, scales: Sequence[float], *, seed: str
) -> BlockView | Bucketed:
    """Return the rows that the rule sees: the contributions, or the means of their buckets."""
    rows = BlockView(let_in.shares, codec, scales=scales)
    if let_in.rule.bucket == 1:
        return rows
    members = [share.member for share in let_in.shares]
    return Bucketed(rows, buckets_of(members, size=let_in.rule.bucket, seed=seed))


def _mean(let_in: _Admitted, codec: Codec) -> Tensor:
    """Return the weighted mean; bitwise equal to :func:`average` if no row was scaled."""
    shares = [
        replace(share, weight=weight)
        for share, weight in zip(let_in.shares, let_in.weights, strict=True)
    ]
    if all(scale == 1.0 for scale in let_in.scales):
        return average(shares, codec=codec).vector
    total = math.fsum(let_in.weights)
    rows = BlockView(shares, codec, scales=let_in.scales)
    return rows.combination([weight / total for weight in let_in.weights])


def _by_coordinate(rows: BlockView | Bucketed, rule: Callable[[Tensor], Tensor]) -> Tensor:
    vector = torch.empty(rows.num_elements)
    for where, strip in rows.strips():
        vector[where] = rule(strip)
    return vector


def _clipped(rows: BlockView | Bucketed, rule: Rule, history: History) -> Tensor:
    """Return the last aggregate, moved by centred clipping."""
    start = history.aggregate
    if start is None or start.numel() != rows.num_elements:
        start = torch.zeros(rows.num_elements)
    factors = centred_clipping(
        squared_distances(rows, anchor=start), radius=rule.number(0, math.inf),
        rounds=int(rule.number(1, 1)),
    )  # fmt: skip
    return rows.combination(factors[1:]).add_(start, alpha=factors[0])
