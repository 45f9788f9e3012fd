"""A whole SWARM on a virtual clock: hub, members and drivers, with fake compute and a bad network.

Everything that decides is the real thing (`Ledger`, `Driver`, `plan_moves`); the members compute
by waiting. Each member records what it applied in every step, so that tests can count.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from atoll.swarm.copies import EVERY_S
from atoll.swarm.evaluations import Evaluated
from atoll.swarm.ledger import Ledger
from atoll.swarm.places import SwarmSettings
from atoll.swarm.routing import BOTH
from atoll.wire.swarm import (
    HeldOutSum,
    Holder,
    Share,
    SwarmAnnounce,
    SwarmPlace,
)
from tests.swarm.simulated_member import (
    LATENCY_S,
    REBUILD_S,
    ROUND_S,
    ROWS,
    SimMember,
)

Part = tuple["SimMember", Holder, list[Share]]
"""A member of a round, as it joined, and its sum."""


@dataclass
class World:
    """The virtual clock, the network and the hub."""

    settings: SwarmSettings
    random: Random
    lossy: float = 0.0
    """Chance that a message between processes is lost; the same that it arrives twice."""
    copies_s: float = EVERY_S
    """Least time between two copies of a member's sum."""
    now: float = 0.0
    members: dict[str, SimMember] = field(default_factory=dict)
    applied: dict[tuple[int, int], dict[str, list[Share]]] = field(default_factory=dict)
    """Shares in what each member applied, by stage and step."""
    means: dict[tuple[int, int], list[Share]] = field(default_factory=dict)
    """Shares in the committed mean of each stage and step."""
    done_rows: int = 0
    save_every: int = 1
    """Steps between two checkpoints."""
    held_out: tuple[int, int] = (0, 0)
    """Microbatches of an evaluation, and of the one at the end."""
    evaluated_every: int = 2
    """Steps between two evaluations."""
    evaluations: list[Evaluated] = field(default_factory=list)
    """What the hub stored; a step that was done again is evaluated again."""

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.ledger = Ledger(self.settings)
        self._waiting: list[Callable[[], bool]] = []
        self.joins: dict[int, dict[str, tuple[SimMember, int]]] = {}
        """By stage and member, with the closing for which it joined."""
        self._restarts = 0
        self.after(1.0, self._tick)

    # ----------------------------------------------------------------------- clock, network

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until

    def run_to_step(self, step: int, *, limit_s: float) -> None:
        while self.ledger.step < step and self._events and self.now < limit_s:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def carry(self, act: Callable[[], None]) -> None:
        """Deliver something once, twice or never."""
        if self.random.random() >= self.lossy:
            self.after(LATENCY_S * (0.5 + self.random.random()), act)
        if self.random.random() < self.lossy:
            self.after(LATENCY_S * (1 + 50 * self.random.random()), act)

    # ---------------------------------------------------------------------------------- hub

    def ask(
        self,
        request: Callable[[], Any],
        answer: Callable[[Any], None],
        *,
        current: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send a request to the hub; it is answered once `request` returns anything but None.

        It is forgotten when it is no longer `current`, as with the session that sent it.
        """

        def poll() -> bool:
            if not current():
                return True
            got = request()
            if got is not None:
                self.carry(lambda: answer(got))
            return got is not None

        def arrive() -> None:
            if not poll():
                self._waiting.append(poll)
            self.changed()

        self.carry(arrive)

    def announce(self, name: str, body: SwarmAnnounce) -> SwarmPlace:
        """Give a member its place; every `save_every` steps there is a checkpoint."""
        place = self.ledger.announce(name, body, self.now)
        if self.ledger.bereft(self.now) >= 0:
            step = self.ledger.step // self.save_every * self.save_every
            for later in range(step, self.ledger.step):  # these are computed again
                for stage in range(self.settings.stages):
                    self.means.pop((stage, later), None)
                    self.applied.pop((stage, later), None)
            history = self.ledger.history if step == self.ledger.step else 0
            self.ledger.go_back(step, history, self.now)
            place = self.ledger.announce(name, body, self.now)
        return place

    def changed(self) -> None:
        """Answer the requests that wait for news."""
        found, self.ledger.evaluations.found = self.ledger.evaluations.found, []
        self.evaluations += found
        waiting, self._waiting = self._waiting, []
        self._waiting += [poll for poll in waiting if not poll()]
        self.start_rounds()

    def _tick(self) -> None:
        self.ledger.tick(self.now)
        self.changed()
        self.after(1.0, self._tick)

    def lose(self, name: str) -> None:
        self.ledger.lost(name, self.now)
        for joined in self.joins.values():
            joined.pop(name, None)
        self.changed()

    def restart(self) -> None:
        """Kill the hub: its memory and every open request are gone."""
        self._restarts += 1
        live = [m.name for m in self.members.values() if m.alive]
        self.ledger = Ledger(
            self.settings,
            first_number=1_000_000 * self._restarts,
            expected=live,
            rebuild_until=self.now + REBUILD_S,
            saved=-1,
        )
        self._waiting, self.joins = [], {}

    # -------------------------------------------------------------------------------- rounds

    def join(self, member: SimMember, closing: int) -> None:
        if closing and member.stage >= 0 and self.ledger.counts[member.stage].closing == closing:
            self.joins.setdefault(member.stage, {})[member.name] = member, closing
            self.start_rounds()

    def start_rounds(self) -> None:
        for stage in range(self.settings.stages if self.settings.agrees else 0):
            count, required = self.ledger.counts[stage], self.ledger.required(stage)
            joins = self.joins.get(stage, {})
            joined = {m.name: m for m, closing in joins.values() if closing == count.closing}
            if count.closing and not count.agreed_by and joined and required <= set(joined):
                self.joins[stage] = {}
                parts = [(m, m.me, list(m.sum)) for m in joined.values()]
                self.after(ROUND_S, self._reduction(stage, self.ledger.step, count.closing, parts))

    def _reduction(
        self, stage: int, step: int, closing: int, parts: list[Part]
    ) -> Callable[[], None]:
        def reduce() -> None:
            if not all(m.alive and m.me == me and m.step == step for m, me, _ in parts):
                for member, _, _ in parts:
                    member.rejoin()  # aborted: a member of the plan is missing
                return
            if self.ledger.step != step or self.ledger.counts[stage].agreed_by:
                return
            mean = [share for _, _, part in parts for share in part]
            self.means[stage, step] = mean
            for member, _, _ in parts:
                member.mean = mean
            names = [m.name for m, _, _ in parts]
            self.ledger.agreed(stage, step, names, self.now, closing=closing)
            self.changed()

        return reduce

    # -------------------------------------------------------------------------------- faults

    def add(self, name: str, row_s: float) -> None:
        """Start a process of a member."""
        SimMember(self, name, row_s).start()

    def kill(self, name: str, *, noticed_s: float = 2.0) -> None:
        """End a process; the hub notices some time later."""
        member = self.members[name]
        member.alive = False

        def notice() -> None:
            if self.members[name] is member:
                self.lose(name)

        self.after(noticed_s, notice)


def check_counts(world: World) -> None:
    """Assert that every microbatch counted exactly once in every stage of every complete step."""
    settings = world.settings
    every = list(range(settings.microbatches))
    # Without rounds a member applies the last step only when it learns of it.
    for step in range(world.ledger.step - (0 if settings.agrees else 1)):
        for stage in range(settings.stages):
            applied = world.applied.get((stage, step), {})
            if settings.agrees:
                sums = [world.means[stage, step], *applied.values()]
            else:
                sums = [[share for shares in applied.values() for share in shares]]
            for shares in sums:
                counts = Counter(share.index for share in shares)
                assert sorted(counts.elements()) == every, (stage, step, counts)


def check_evaluations(world: World) -> None:
    """Assert that every complete step that was due was measured, and each of its rows once.

    Microbatch k of an evaluation has a loss of 2 ** k on one target: the sum shows which were added
    how often, and a state's step is its unit.
    """
    between, end = world.held_out
    for one in world.evaluations:
        count = end if one.last else between
        assert one.total == HeldOutSum((2.0**count - 1) * (one.step + 1), count), one
    measured = {one.step for one in world.evaluations}
    every = world.evaluated_every
    due = [step for step in range(world.ledger.step) if step % every == 0]
    assert not between or set(due) <= measured


def calm_rate(world: World) -> float:
    """Return the ideal microbatches per second: all speeds added up, divided by the work."""
    speed = sum(1 / member.row_s for member in world.members.values() if member.alive)
    return speed / (BOTH * ROWS * world.settings.stages)
