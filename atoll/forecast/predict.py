"""One candidate on one fleet: seconds per step, bytes, memory, money, the worth of its tokens.

period   the steps between two rounds take as long as the slowest member needs for its share of
         them (`pace`: slower members do fewer); a round follows, of which what is done while
         training continues does not count. A result that comes later cuts a period in two, in each
         of which a member does its share in whole steps
rate     steps of the fastest member per second, times the share of the time in which members
         are there and nothing is lost by failures
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.codec.costs import UNKNOWN
from atoll.codec.layout import last_bytes
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet, Machine, few
from atoll.forecast.candidates import Candidate
from atoll.forecast.efficiency import ALONE, Gain, gain_of
from atoll.forecast.network import Exchange, direct_round_s, relay_round_s
from atoll.forecast.workload import Step, TrafficOf, Workload, spread
from atoll.group.aggregation import Aggregation
from atoll.methods.codecs import CODECS
from atoll.rounds.commit import assign_steps
from atoll.rounds.timing import RoundTimings, expect_round, hiding_steps
from atoll.strategies.resolve import Resolved
from atoll.wire.limits import CHUNK_BYTES

DAY_S = 86_400.0
LOST_BY_FAILURE_S = 60.0
"""Seconds of all members' time per failure, besides half of the member's period: a guess; notice,
grace and restart are a few tens of seconds each."""
NETWORK_ERROR = 0.3
"""A predicted round is right within this share, unless a line changes."""
LONGEST_STEP_S = 1.0
"""Members with shorter steps join a round before the end of their period."""
STEPS_OF_TRAFFIC, PERIODS_OF_TRAFFIC = 1000, 20
"""Steps and periods of which the traffic is counted at least, so that the last round, in which some
methods send more, hardly matters; at most the run's."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is predicted of a candidate. Rates are of all members together."""

    candidate: Candidate
    step_s: float
    """Seconds per step of the fastest member, rounds included."""
    step_low_s: float
    step_high_s: float
    compute_s: float
    """Of these, seconds in which the slowest member computes."""
    waiting_s: float
    """Of these, seconds in which training waits for a round."""
    round_s: float
    """Seconds of one round, hidden or not."""
    every: float
    """Steps between two rounds."""
    delay: int
    """Steps until a round's result is applied."""
    sent_bytes: float
    """Per step and member, after the shared start; the member that sends most on the direct route
    may send a block more."""
    received_bytes: float
    shares: Mapping[str, float]
    """Steps of each member, as shares of the fastest one's."""
    up: float
    """Share of the time in which the run goes on."""
    price_per_hour: float
    gain: Gain
    tokens: int
    """Of one step of one member."""
    fits: bool | None
    grounds: tuple[str, ...]
    """What the numbers rest on."""

    @property
    def members_worth(self) -> tuple[float, float, float]:
        """Low, middle and high number of fastest members that all together are worth."""
        return self.gain.worth(sum(self.shares.values()))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all members, whatever they are worth."""
        return self.up * sum(self.shares.values()) * self.tokens / self.step_s

    @property
    def worth_per_s(self) -> tuple[float, float, float]:
        """Tokens per second that data parallel would need for the same progress: low, middle, high.

        The interval is that of the method's worth and that of the step together.
        """
        low, middle, high = self.members_worth
        rate = self.up * self.tokens
        return (
            rate * low / self.step_high_s,
            rate * middle / self.step_s,
            rate * high / self.step_low_s,
        )


class Planner:
    """Predicts candidates for one workload; keeps the traffic of methods."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._traffic = TrafficOf(workload)

    def predict(self, fleet: Fleet, candidate: Candidate) -> Forecast:
        """Return the forecast.

        Raises:
            ConfigError: a machine's speed or line is not known, or members cannot connect.
        """
        members = fleet.of(candidate.members)
        steps = {machine.name: self.workload.step_on(machine) for machine in members}
        if candidate.alone:
            return self._alone(members[0], candidate, steps)
        resolved = candidate.resolved(steps=min(STEPS_OF_TRAFFIC, self.workload.steps))
        run = steps_of_traffic(resolved, steps=self.workload.steps)
        traffic = self._traffic(resolved, peers=len(members), steps=run)
        under_way = run - shared_steps(resolved, steps=run)
        every = steps_between(resolved, steps=run, rounds=traffic.rounds)
        periods = under_way / every  # in the steps before, nothing is sent
        exchange = Exchange(
            relay_sent=traffic.relay_sent_bytes / periods,
            relay_received=traffic.relay_received_bytes / periods,
            direct_sent=traffic.direct_sent_bytes / periods,
            direct_received=traffic.direct_received_bytes / periods,
            relay_last=relay_last(resolved, traffic.relay_received_bytes / periods),
            plain=resolved.codec == "fp32",
        )
        hidden = min(every, hidden_steps(resolved))
        parts = [part for part in (hidden, every - hidden) if part > 0]
        own = _own_steps(steps, parts=parts, paced=self._paced(resolved))
        shares = {name: sum(done) / every for name, done in own.items()}
        period_s = max(share * every * steps[name].seconds for name, share in shares.items())
        lags = [period_s - shares[m.name] * every * steps[m.name].seconds for m in members]
        # As `RoundClient.announce` does it.
        ahead = not hidden and every > 1 and max(s.seconds for s in steps.values()) < LONGEST_STEP_S
        round_s = self._round_s(
            fleet, members, candidate, exchange, pause_s=period_s, lags=lags, ahead=ahead
        )
        waiting_s = round_s
        if hidden:  # until its result comes, a member has something to do
            waiting_s = -period_s + max(
                max(done[0] * steps[name].seconds, round_s) + sum(done[1:]) * steps[name].seconds
                for name, done in own.items()
            )
        step_s = (period_s + waiting_s) / every
        low, high = spread(list(steps.values()))
        relay = candidate.route == "relay"
        delay = _delay(resolved, round_s=round_s, step_s=period_s / every)
        uptime = _uptime(members, period_s=period_s + waiting_s)
        vectors = vectors_of(resolved)
        return Forecast(
            candidate=candidate, step_s=step_s, compute_s=period_s / every,
            step_low_s=(period_s * low + waiting_s * (1 - NETWORK_ERROR)) / every,
            step_high_s=(period_s * high + waiting_s * (1 + NETWORK_ERROR)) / every,
            waiting_s=waiting_s / every, round_s=round_s, every=every, delay=delay,
            sent_bytes=(exchange.relay_sent if relay else exchange.direct_sent) / every,
            received_bytes=(exchange.relay_received if relay else exchange.direct_received) / every,
            shares=_present(shares, members), up=uptime,
            price_per_hour=sum(m.price_per_hour * m.share for m in members),
            gain=gain_of(
                candidate.preset, every=int(candidate.options.get("every", 1)),
                delay=delay, codec=candidate.codec,
            ),
            tokens=self.workload.tokens,
            fits=_all_fit(self.workload, members, vectors), grounds=tuple(_grounds(steps)),
        )  # fmt: skip

    def _alone(self, machine: Machine, candidate: Candidate, steps: Mapping[str, Step]) -> Forecast:
        step = steps[machine.name]
        return Forecast(
            candidate=candidate, step_s=step.seconds, step_low_s=step.low, step_high_s=step.high,
            compute_s=step.seconds, waiting_s=0.0, round_s=0.0, every=math.inf, delay=0,
            sent_bytes=0.0, received_bytes=0.0, shares={machine.name: 1.0},
            up=_uptime([machine], period_s=0.0), gain=ALONE, tokens=self.workload.tokens,
            price_per_hour=machine.price_per_hour * machine.share,
            fits=self.workload.fits(machine, vectors=0.0), grounds=tuple(_grounds(steps)),
        )  # fmt: skip

    def _paced(self, resolved: Resolved) -> bool:
        return self.workload.paced and not resolved.method.uses_gradients

    def _round_s(
        self, fleet: Fleet, members: Sequence[Machine], candidate: Candidate, exchange: Exchange,
        *, pause_s: float, lags: Sequence[float], ahead: bool,
    ) -> float:  # fmt: skip
        if candidate.route == "direct":
            lines = direct_round_s(
                fleet, members, exchange, collective=candidate.collective, pause_s=pause_s,
                lags=lags, ahead=ahead,
            )  # fmt: skip
        else:
            lines = relay_round_s(fleet, members, exchange, pause_s=pause_s, lags=lags, ahead=ahead)
        if math.isinf(lines):
            raise ConfigError(
                f"a round by the {candidate.route} route cannot be predicted",
                given=_missing(fleet, members, candidate.route),
                remedy="atoll doctor measures it; or say it in the file of machines",
            )  # fmt: skip
        return lines + coding_s(candidate.codec, elements=self.workload.elements)


def relay_last(resolved: Resolved, nbytes: float) -> float:
    """Return how many of a round's bytes from the hub wait for the last contribution."""
    if resolved.aggregation != Aggregation():
        return nbytes
    return last_bytes(resolved.codec, nbytes, piece=CHUNK_BYTES)


def coding_s(codec: str, *, elements: int) -> float:
    """Return the seconds of encoding and decoding in a round of the whole model, both ways."""
    name = codec.removeprefix("feedback(").partition(":")[0].partition("|")[0].rstrip(")")
    row = CODECS.get(name, UNKNOWN)
    each = 1 / row.encode_bytes_per_s + 1 / row.decode_bytes_per_s
    return 2 * 4 * elements * each


def steps_of_traffic(resolved: Resolved, *, steps: int) -> int:
    """Return of how many steps the traffic is counted: of whole periods after the common start."""
    every = max(1, int(getattr(resolved.method, "every", 1)))  # 0: the method decides it
    periods = max(PERIODS_OF_TRAFFIC, -(-STEPS_OF_TRAFFIC // every))
    return min(steps, int(getattr(resolved.method, "shared_steps", 0)) + periods * every)


def steps_between(resolved: Resolved, *, steps: int, rounds: int) -> float:
    """Return the steps between two rounds, the common start left out."""
    shared = shared_steps(resolved, steps=steps)
    return (steps - shared) / max(1, rounds - 1 - (shared > 0))


def shared_steps(resolved: Resolved, *, steps: int) -> int:
    """Return the first steps, which all members do on the same data without sending anything."""
    return min(steps - 1, int(getattr(resolved.method, "shared_steps", 0)))


def hidden_steps(resolved: Resolved) -> float:
    """Return the steps that members train while a round is under way."""
    method = resolved.method
    if method.name == "eager":
        return float(method.every)  # type: ignore[attr-defined]
    if method.name == "cocktail":
        return 1.0
    delay = getattr(method, "delay", 0)
    return float(longest_delay(method) if isinstance(delay, str) else delay)


def longest_delay(method: Any) -> int:
    """Return the steps that a round of a fragment may last before the next one begins."""
    gap = method.every // method.fragments if method.staggered else method.every
    return max(0, int(gap) - 1)


def _delay(resolved: Resolved, *, round_s: float, step_s: float) -> int:
    """Return the steps until a result is applied; `auto` takes as many as a round lasts."""
    delay = getattr(resolved.method, "delay", 1)
    if not isinstance(delay, str):
        return int(delay)
    timings = RoundTimings()  # by the rule that the hub has for measured rounds
    expect_round(timings, round_s)
    return min(longest_delay(resolved.method), hiding_steps(timings, step_s=step_s))


def vectors_of(resolved: Resolved) -> float:
    """Return the vectors as long as the model that a method keeps: start, scratch, its own."""
    row = CODECS.get(resolved.codec.partition("(")[0], UNKNOWN)
    return 2.0 + resolved.method.later_vectors + row.kept_vectors


def _own_steps(
    steps: Mapping[str, Step], *, parts: Sequence[float], paced: bool
) -> dict[str, list[float]]:
    """Return each member's steps in every part of a period, as the hub assigns them."""
    if not paced or sum(parts) < 2:
        return {name: list(parts) for name in steps}
    assigned = assign_steps({name: step.seconds for name, step in steps.items()}, steps)
    return {
        name: [float(max(1, round(part * assigned[name]))) for part in parts]
        if name in assigned
        else list(parts)
        for name in steps
    }


def _present(shares: Mapping[str, float], members: Sequence[Machine]) -> dict[str, float]:
    """Return the shares of steps, less for machines that are there for less of the day."""
    longest = max(machine.share for machine in members)
    return {m.name: shares[m.name] * m.share / (longest or 1.0) for m in members}


def _uptime(members: Sequence[Machine], *, period_s: float) -> float:
    """Return the share of the time in which training goes on."""
    lost = sum(m.failures_per_day for m in members) * LOST_BY_FAILURE_S
    lost += sum(m.failures_per_day for m in members) * period_s / 2 / max(1, len(members))
    return max(m.share for m in members) * DAY_S / (DAY_S + lost)


def _all_fit(workload: Workload, members: Sequence[Machine], vectors: float) -> bool | None:
    found = [workload.fits(machine, vectors=vectors) for machine in members]
    return False if False in found else None if None in found else True


def _missing(fleet: Fleet, members: Sequence[Machine], route: str) -> str:
    if route == "direct" and not fleet.all_reach(members):
        return "the machines do not reach each other: no common site, no link between them"
    names = [m.name for m in members if not (m.up_mbps and m.down_mbps)]
    return f"the line of {few(names)} is not known" if names else "a line is not known"


def _grounds(steps: Mapping[str, Step]) -> list[str]:
    """Return what the step times rest on, machines with the same ground together."""
    by: dict[str, list[str]] = {}
    for name, step in steps.items():
        by.setdefault(step.ground, []).append(name)
    return [f"step of {few(names)}: {ground}" for ground, names in by.items()]
