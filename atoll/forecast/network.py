"""How long one round takes on a fleet's lines: a latency-bandwidth model. Pure, no torch.

Legend: S bytes, B bytes per second of a line, r round trip of a member to the hub, n members.

Relay    every member asks the hub and is answered (r), sends S, gets the result, and votes (r).
         What all have sent the beginning of comes down while the rest goes up (fp32, bf16, fp16,
         int8, sigma8); with other codecs the reducer answers when it has everything, and both
         directions do not overlap. The hub's own line bears all members. A far member with a
         fast line and a near one with a slow line are done sooner than both maxima together: times
         are counted for each member.
Direct   the same two questions to the hub; between them a ring for fp32 (2 (n - 1) steps of S / n),
         else two all-to-all exchanges, or the collective named. A member near the hub has the plan
         earlier and begins before the others, so that times are counted for each member: with a far
         one their sum is a fifth less than that of the longest.

TCP starts slowly: the window begins with ten segments and doubles per round trip until the line is
full (RFC 6928, RFC 5681); in a pause it halves with every retransmission time-out (RFC 2861),
unless its congestion control is BBR, which keeps the rate that it has measured. On long lines this
costs more than the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.fleet.fleet import MBPS, Fleet, Machine, Path
from atoll.group.collectives.topology import folded, group_size
from atoll.wire.limits import CHUNK_BYTES

FIRST_WINDOW_BYTES = 10 * 1448
"""TCP's first window."""
LEAST_TIMEOUT_S = 0.2
"""A retransmission time-out is the round trip and at least so much, on Linux."""
GOODPUT = 0.94
"""Share of a line's rate that is payload, behind headers of IP, TCP and TLS."""
CREDIT_BYTES = 4 * 2**20
"""Window of one sender and receiver at the hub (docs/decisions/0001)."""
HUB_S = 0.004
"""Seconds for which a hub works on one question of a round; see `python -m bench.plan`."""
EXCHANGE_S = 0.002
"""Seconds of threads and system calls per message of a direct exchange."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one member sends and receives in one round, encoded."""

    relay_sent: float
    relay_received: float
    direct_sent: float
    direct_received: float
    relay_last: float = math.inf
    """Of those received from the hub, what waits for the last byte that any member sends; the rest
    comes down while the others are still sending (:mod:`atoll.reducer.early`)."""
    plain: bool = False
    """fp32 without a codec, which goes round a ring on the direct route."""


def transfer_s(nbytes: float, path: Path, *, pause_s: float = math.inf) -> float:
    """Return the seconds until the last byte has arrived; inf without a line.

    `pause_s` is how long the connection has sent nothing.
    """
    if nbytes <= 0:
        return path.round_trip_s / 2
    rate, trip = path.bytes_per_s * GOODPUT, path.round_trip_s
    if rate <= 0:
        return math.inf
    window, sent, seconds = _window(nbytes, path, pause_s=pause_s), 0.0, 0.0
    while sent + window < nbytes and window < rate * trip:
        seconds, sent, window = seconds + trip, sent + window, 2 * window
    return seconds + (nbytes - sent) / rate + trip / 2


def _window(nbytes: float, path: Path, *, pause_s: float) -> float:
    """Return TCP's window after a pause, if transfers of this size came before it."""
    reached = min(path.bytes_per_s * GOODPUT * path.round_trip_s, nbytes)
    if path.keeps_rate and not math.isinf(pause_s):
        return max(FIRST_WINDOW_BYTES, reached)
    halvings = min(64.0, pause_s // (LEAST_TIMEOUT_S + path.round_trip_s))
    return max(FIRST_WINDOW_BYTES, reached / 2**halvings)


def relay_round_s(
    fleet: Fleet, members: Sequence[Machine], exchange: Exchange, *, pause_s: float = math.inf,
    lags: Sequence[float] = (), ahead: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of one round through the hub, with all members there; inf: no line.

    It is counted from the moment at which the last member is done with its steps.

    Args:
        fleet: The lines.
        members: Those that take part.
        exchange: What each of them sends.
        pause_s: How long they train between two rounds.
        lags: How many seconds before the last one each member is done; empty: all at once.
        ahead: Members join a way to the hub before the end of their steps: the plan is there then.
    """
    up, down = fleet.hub_rates_mbps
    ways = [
        (exchange.relay_sent, [_part(fleet.to_hub(m), up, members) for m in members]),
        (exchange.relay_received, [_part(fleet.from_hub(m), down, members) for m in members]),
    ]
    half_trips = [path.round_trip_s / 2 for path in _to_hub(fleet, members)]
    ask_time_s = 2 * HUB_S * len(members) if ahead else ask_s(fleet, members, lags)
    lags = (lags if ahead else ()) or [0.0] * len(members)
    pauses = [pause_s + ask_time_s + 2 * max(half_trips)] * 2
    for _ in range(2):  # while one direction works the other one pauses
        sent, received = (
            [
                half - lag + transfer_s(nbytes, path, pause_s=pause)
                for half, lag, path in zip(half_trips, before, paths, strict=True)
            ]
            for (nbytes, paths), pause, before in zip(
                ways, pauses, (lags, [0.0] * len(members)), strict=True
            )
        )  # the plan's way or the last verdict's, then the vote's
        pauses = [pause_s + ask_time_s + max(received), pause_s + ask_time_s + max(sent)]
    last = min(exchange.relay_last, exchange.relay_received)
    if last == exchange.relay_received:
        return ask_time_s + max(sent) + max(received)
    (_, up_paths), (_, down_paths) = ways
    first_s = max(transfer_s(CHUNK_BYTES, path, pause_s=0.0) for path in up_paths)
    last_s = max(transfer_s(last, path, pause_s=0.0) for path in down_paths)
    return ask_time_s + max(max(sent) + last_s, max(half_trips) + first_s + max(received))


def ask_s(fleet: Fleet, members: Sequence[Machine], lags: Sequence[float] = ()) -> float:
    """Return the seconds of the ways to the hub that no exchange hides, and of its own work.

    The last to ask determines the plan: who is far from the hub, or done late. The verdict's way
    back to it is counted here, too: until it has come the member does not train.
    """
    trips = [path.round_trip_s for path in _to_hub(fleet, members)]
    slowest_s = max(trip - lag for trip, lag in zip(trips, lags or [0.0] * len(trips), strict=True))
    return max(0.0, slowest_s) + 2 * HUB_S * len(members)


def _to_hub(fleet: Fleet, members: Sequence[Machine]) -> list[Path]:
    return [fleet.to_hub(member) for member in members]


def _part(path: Path, shared_mbps: float, members: Sequence[Machine]) -> Path:
    """Return a member's line, limited by its part of the hub's line and by the hub's credit."""
    rate = path.bytes_per_s
    if shared_mbps:
        rate = min(rate, shared_mbps * MBPS / 8 / len(members))
    if path.round_trip_s:
        rate = min(rate, CREDIT_BYTES / path.round_trip_s)
    return Path(rate, path.round_trip_s, path.keeps_rate)


def direct_round_s(
    fleet: Fleet, members: Sequence[Machine], exchange: Exchange, *, collective: str = "auto",
    pause_s: float = math.inf, lags: Sequence[float] = (), ahead: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of one round between members; inf where they do not reach each other.

    Arguments as those of `relay_round_s`.
    """
    if not fleet.all_reach(members):
        return math.inf
    half_trips = [path.round_trip_s / 2 for path in _to_hub(fleet, members)]
    ask_time_s = 2 * HUB_S * len(members) if ahead else ask_s(fleet, members, lags)
    before = (lags if ahead else ()) or [0.0] * len(members)
    begin = [half - lag for half, lag in zip(half_trips, before, strict=True)]
    pause = pause_s + ask_time_s + 2 * max(half_trips)
    ways = SUMS.get(collective, _ring_s)
    if exchange.plain and ways is _ring_s:
        done = _ring(fleet, members, exchange.direct_sent, pause, begin=begin)
    elif exchange.plain:
        seconds = ways(fleet, members, exchange.direct_sent, pause)
        done = [max(begin) + seconds] * len(members)
    elif collective == "star":
        seconds = _star_s(fleet, members, exchange.relay_sent, pause)
        done = [max(begin) + seconds] * len(members)
    else:  # two all-to-all exchanges: half of the bytes each
        half = max(exchange.direct_sent, exchange.direct_received) / 2
        first = _all_at_once(fleet, members, half, begin=begin, pause_s=pause)
        done = _all_at_once(fleet, members, half, begin=first, pause_s=0.0)
    return ask_time_s + max(end + trip for end, trip in zip(done, half_trips, strict=True))


def _all_at_once(
    fleet: Fleet, members: Sequence[Machine], moved: float, *, begin: Sequence[float],
    pause_s: float,
) -> list[float]:  # fmt: skip
    """Return when each member has the shares of all others, which begin at different times."""
    others = len(members) - 1
    done = []
    for receiver in members:
        seconds = 0.0
        for sender, since in zip(members, begin, strict=True):
            if sender is receiver:
                seconds = max(seconds, since)
                continue
            path = fleet.between(sender, receiver)
            shared = Path(path.bytes_per_s / others, path.round_trip_s, path.keeps_rate)
            seconds = max(seconds, since + transfer_s(moved / others, shared, pause_s=pause_s))
        done.append(seconds + EXCHANGE_S * others)
    return done


# -------------------------------------------------- sums of partial sums, for fp32 on direct lines


def _ring_s(fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float) -> float:
    """Return the seconds of 2 (n - 1) steps; in each all hops are used at once."""
    return max(_ring(fleet, members, moved, pause_s, begin=[0.0] * len(members)))


def _ring(
    fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float, *,
    begin: Sequence[float],
) -> list[float]:  # fmt: skip
    """Return when each member is done: in every step it needs the piece of the one before it.

    A piece cannot arrive before the line has carried the one before it.
    """
    n, steps = len(members), 2 * (len(members) - 1)
    paths = [fleet.between(members[i - 1], members[i]) for i in range(n)]
    if any(path.bytes_per_s <= 0 for path in paths):
        return [math.inf] * n
    piece = moved / steps
    hops = [_pieces(piece, path, steps, pause_s) for path in paths]
    on_line = [piece / (path.bytes_per_s * GOODPUT) for path in paths]
    times = list(begin)
    for step in range(steps):
        times = [
            max(times[i] + (on_line[i] if step else 0.0), times[i - 1] + hops[i][step]) + EXCHANGE_S
            for i in range(n)
        ]
    return times


def _hops_s(hops: Sequence[Path], nbytes: float, *, steps: int, pause_s: float) -> float:
    """Return the seconds of steps of one piece; the first few have TCP's small window."""
    slowest = max(sum(_pieces(nbytes, hop, steps, pause_s)) for hop in hops)
    return slowest + steps * EXCHANGE_S


def _pieces(nbytes: float, path: Path, steps: int, pause_s: float) -> list[float]:
    """Return the seconds of each piece on one connection; its window grows from one to the next."""
    rate, trip = path.bytes_per_s * GOODPUT, path.round_trip_s
    if rate <= 0:
        return [math.inf] * steps
    window, found = _window(nbytes, path, pause_s=pause_s), []
    for _ in range(steps):
        sent, seconds = 0.0, 0.0
        while sent + window < nbytes and window < rate * trip:
            seconds, sent, window = seconds + trip, sent + window, 2 * window
        found.append(seconds + (nbytes - sent) / rate + trip / 2)
        window = min(2 * window, max(window, rate * trip))
    return found


def _tree_s(fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float) -> float:
    n, worst = len(members), _worst(fleet, members)
    vector = moved * n / (2 * (n - 1))
    return _hops_s([worst], vector, steps=2 * math.ceil(math.log2(n)), pause_s=pause_s)


def _butterfly_s(fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float) -> float:
    n, worst = len(members), _worst(fleet, members)
    vector = moved * n / (2 * (n - 1))
    active = folded(n)
    fold = 0.0 if active == n else 2 * transfer_s(vector, worst, pause_s=pause_s)
    distances = [vector / 2**k for k in range(1, int(math.log2(active)) + 1)]
    each = [transfer_s(part, worst, pause_s=pause_s) for part in distances]
    return fold + 2 * (sum(each) + EXCHANGE_S * len(each))


def _star_s(fleet: Fleet, members: Sequence[Machine], vector: float, pause_s: float) -> float:
    """Return the seconds in which all send to the first member, and it sends back to all."""
    centre, others = members[0], members[1:]
    seconds = 0.0
    for paths in (
        [fleet.between(other, centre) for other in others],
        [fleet.between(centre, other) for other in others],
    ):
        shared = [
            Path(path.bytes_per_s / len(others), path.round_trip_s, path.keeps_rate)
            for path in paths
        ]
        slowest = max(transfer_s(vector, path, pause_s=pause_s) for path in shared)
        seconds += slowest + EXCHANGE_S * len(others)
    return seconds


def _star_of_sums_s(
    fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float
) -> float:
    n = len(members)
    return _star_s(fleet, members, moved * n / (2 * (n - 1)), pause_s)


def _hierarchical_s(
    fleet: Fleet, members: Sequence[Machine], moved: float, pause_s: float
) -> float:
    """Return the seconds of rings inside groups, then of rings between them."""
    n = len(members)
    size = group_size(n)
    if size == 1:
        return _ring_s(fleet, members, moved, pause_s)
    vector = moved * n / (2 * (n - 1))
    inside = [
        fleet.between(members[g * size + i], members[g * size + (i + 1) % size])
        for g in range(n // size)
        for i in range(size)
    ]
    groups = n // size
    across = [
        fleet.between(members[g * size + i], members[(g + 1) % groups * size + i])
        for g in range(groups)
        for i in range(size)
    ]
    near = _hops_s(inside, vector / size, steps=2 * (size - 1), pause_s=pause_s)
    far = _hops_s(across, vector / size / groups, steps=2 * (groups - 1), pause_s=pause_s)
    return near + far


def _worst(fleet: Fleet, members: Sequence[Machine]) -> Path:
    paths = [fleet.between(a, b) for a in members for b in members if a is not b]
    return Path(
        min(p.bytes_per_s for p in paths), max(p.round_trip_s for p in paths),
        all(p.keeps_rate for p in paths),
    )  # fmt: skip


SUMS: dict[str, Callable[[Fleet, Sequence[Machine], float, float], float]] = {
    "auto": _ring_s, "ring": _ring_s, "tree": _tree_s, "butterfly": _butterfly_s,
    "star": _star_of_sums_s, "hierarchical": _hierarchical_s,
}  # fmt: skip
