"""What may be chosen: method, interval, codec, delay, route, collective and members."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.config import JobSpec, StrategyTable, dump_tables
from atoll.errors import ConfigError
from atoll.fleet.fleet import Fleet
from atoll.forecast.efficiency import EVERY_STEP, PERIODIC
from atoll.forecast.keys import AUTO, adapts_delay
from atoll.group.aggregation import ADD_ON_THE_WAY
from atoll.methods.table import PRESETS
from atoll.strategies.compatibility import check
from atoll.strategies.resolve import Resolved, resolve

ROUTES = ("relay", "direct")

EVERY = (10, 25, 50, 100, 200, 500)
"""Intervals that are tried."""
FEWEST_ROUNDS = 4
"""Rounds that a run has at least: a longer interval is not tried."""
CODECS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("fp32", "feedback(int8)"),
    "diloco": ("fp32", "feedback(int8)", "feedback(int4)"),
    "streaming-diloco": ("feedback(int8)", "feedback(e3m0)"),
}
"""Codecs tried besides a preset's own, of which the losses were measured."""
DELAY_SHARES = (0.0, 0.25, 0.9)
"""Delays tried, as shares of the longest one possible; at least one step."""
FOR_THIS = ("ddp", "powersgd", "one-bit-adam", "local-sgd", "diloco", "streaming-diloco", "muloco")
"""Presets tried unless others are named."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a job; hashable, so that equal ones are predicted once."""

    preset: str
    members: tuple[str, ...]
    codec: str = ""
    route: str = "relay"
    collective: str = AUTO
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        options = tuple(sorted(self.options.items()))
        return hash((self.preset, self.members, self.codec, self.route, self.collective, options))

    @property
    def alone(self) -> bool:
        """Whether one machine trains by itself."""
        return len(self.members) == 1

    def table(self) -> StrategyTable:
        """Return `[strategy]` of the job file."""
        return StrategyTable(
            preset=self.preset, codec=self.codec, collective=self.collective, options=self.options
        )

    def resolved(self, *, steps: int) -> Resolved:
        """Return the strategy with all defaults; raises ConfigError for what cannot be."""
        return resolve(self.table(), steps=steps)

    def words(self) -> str:
        """Return it in one line, without members."""
        if self.alone:
            return f"{self.members[0]} alone"
        more = [f"{name} {value}" for name, value in self.options.items() if name in SHOWN]
        where = self.route if self.collective == AUTO else f"{self.route} {self.collective}"
        return ", ".join([self.preset, *more, self.codec or PRESETS[self.preset].codec, where])

    def toml(self, *, of: int = 0) -> str:
        """Return what to paste into a job file; its own [job] and [strategy] are replaced.

        The names of the members are left out if they are all of the `of` machines.
        """
        job: dict[str, Any] = {"nodes": len(self.members)}
        job |= {} if self.alone else {"route": self.route}
        job |= {} if len(self.members) == of else {"on": list(self.members)}
        strategy: dict[str, Any] = {"preset": self.preset}
        strategy |= {"codec": self.codec} if self.codec else {}
        strategy |= {"collective": self.collective} if self.collective != AUTO else {}
        return dump_tables({"job": job, "strategy": {**strategy, **self.options}})


SHOWN = ("every", "delay")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What the job file fixes; empty or `auto`: the planner's choice."""

    presets: tuple[str, ...] = FOR_THIS
    every: tuple[int, ...] = EVERY
    codecs: tuple[str, ...] = ()
    """Empty: the preset's own and those of `CODECS`."""
    delay: int | str = -1
    """-1: any; `auto`: as measured rounds say."""
    route: str = AUTO
    collective: str = AUTO
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the method that stay as they are."""
    whole_fleet: bool = False
    """Whether all machines take part, whatever that costs."""

    @classmethod
    def of(cls, spec: JobSpec) -> SearchSpace:
        """Return what a job with some keys `auto` leaves open: its method is fixed."""
        table, options = spec.strategy, dict(spec.strategy.options)
        preset = PRESETS[table.preset]
        every = options.pop("every", preset.options.get("every", AUTO))
        delay = str(options.pop("delay", AUTO))
        if delay.startswith(AUTO):
            delay = AUTO if adapts_delay(spec) else "-1"
        return cls(
            presets=(table.preset,),
            every=EVERY if every == AUTO else (int(every),),
            codecs=choices_of(table.codec or preset.codec),
            delay=delay if delay == AUTO else int(delay),
            route=spec.job.route, collective=table.collective, options=options,
        )  # fmt: skip


def choices_of(codec: str) -> tuple[str, ...]:
    """Return the codecs among which a codec chooses, in order of precision; mostly itself."""
    if AUTO not in codec:
        return (codec,)
    from atoll.codec.registry import make_codec
    from atoll.codec.wrappers.auto import auto_inside

    auto = auto_inside(make_codec(codec))
    if auto is None:
        return (codec,)
    wrapped = codec.startswith("feedback(")
    return tuple(
        f"feedback({part.spec})" if wrapped and part.spec != "fp32" else part.spec
        for part in auto.parts
    )


def candidates(
    fleet: Fleet, *, steps: int, optimizer: str, space: SearchSpace | None = None
) -> Iterator[Candidate]:
    """Yield every candidate that the rules of a job allow: all machines, then fewer, then one.

    Args:
        fleet: The machines.
        steps: Of the run, which limits the intervals.
        optimizer: Of `[train]`.
        space: What is fixed already.
    """
    space = space or SearchSpace()
    all_machines = [tuple(machine.name for machine in fleet.machines)]
    for names in all_machines if space.whole_fleet else member_sets(fleet):
        if len(names) == 1:
            yield Candidate(preset="alone", members=names, codec="fp32")
            continue
        direct = fleet.all_reach(fleet.of(names))
        for preset in space.presets:
            for found in _of_preset(preset, names, space, steps=steps, direct=direct):
                if _possible(found, steps=steps, optimizer=optimizer):
                    yield found


def member_sets(fleet: Fleet) -> list[tuple[str, ...]]:
    """Return which machines may take part: all, all but one, the better halves, and each alone."""
    names = tuple(machine.name for machine in fleet.machines)
    found = [names]
    if 2 < len(names) <= MOST_LEFT_OUT:
        found += [tuple(n for n in names if n != out) for out in names]
    for key in (_speed, _line):
        order = sorted(fleet.machines, key=key, reverse=True)
        size = len(order) // 2
        while size > 1:
            best = {machine.name for machine in order[:size]}
            found.append(tuple(name for name in names if name in best))
            size //= 2
    fastest = max(fleet.machines, key=_speed)
    found.append((fastest.name,))
    return list(dict.fromkeys(found))


MOST_LEFT_OUT = 12
"""Up to so many machines each is left out in turn."""


def _speed(machine: Any) -> float:
    return float(1 / machine.step_s if machine.step_s else machine.gflops / 1e6)


def _line(machine: Any) -> float:
    return float(min(machine.up_mbps, machine.down_mbps))


def _of_preset(
    preset: str, names: tuple[str, ...], space: SearchSpace, *, steps: int, direct: bool
) -> Iterator[Candidate]:
    own = PRESETS[preset].codec
    codecs = space.codecs or tuple(dict.fromkeys((own, *CODECS.get(preset, ()))))
    routes = [
        route for route in ROUTES
        if space.route in (AUTO, route) and (route == "relay" or direct)
    ]  # fmt: skip
    for options in _options(preset, space, steps=steps):
        for codec in codecs:
            for route in routes:
                for collective in _collectives(space, route=route, codec=codec, members=len(names)):
                    yield Candidate(
                        preset=preset, members=names, codec=codec, route=route,
                        collective=collective, options=options,
                    )  # fmt: skip


def _collectives(space: SearchSpace, *, route: str, codec: str, members: int) -> Sequence[str]:
    if space.collective != AUTO or route == "relay":
        return (space.collective,) if route == "direct" or space.collective == AUTO else ()
    if codec != "fp32" or members < 3:
        return (AUTO,)
    return (AUTO, *(name for name in ADD_ON_THE_WAY if name != "ring"))


def _options(preset: str, space: SearchSpace, *, steps: int) -> Iterator[Mapping[str, Any]]:
    """Yield the options that are tried of a method."""
    kept = dict(space.options)
    if preset in EVERY_STEP and preset not in PERIODIC:
        yield kept
        return
    most = max(1, steps // FEWEST_ROUNDS)
    intervals = [every for every in space.every if every <= most] or [min(space.every)]
    for every in intervals:
        if preset != "streaming-diloco":
            yield {**kept, "every": every}
            continue
        fragments = int(kept.get("fragments", 4))
        if every < 2 * fragments:
            continue
        longest = every // fragments - 1
        delays = {max(1, round(share * longest)) for share in DELAY_SHARES}
        for delay in sorted(delays) if space.delay == -1 else [space.delay]:
            yield {**kept, "every": every, "delay": delay}


def _possible(candidate: Candidate, *, steps: int, optimizer: str) -> bool:
    """Return whether the rules of jobs allow it."""
    if candidate.preset == "muloco" and optimizer != "muon":
        return False
    if candidate.preset == "one-bit-adam" and optimizer != "adamw":
        return False
    try:
        check(
            candidate.resolved(steps=steps), nodes=len(candidate.members),
            min_nodes=len(candidate.members), route=candidate.route, optimizer=optimizer,
        )  # fmt: skip
    except ConfigError:
        return False
    return True
