"""A cluster as a state machine: hypothesis chooses what happens next, and shrinks what breaks."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.faults.simulation.faults import FAULTS, Faults, target_of
from tests.faults.simulation.schedule import PATIENCE_S, finish
from tests.faults.simulation.world import Setting, simulated
from tests.tiers import examples


class Cluster(RuleBasedStateMachine):
    """Members come, go, freeze and lose their lines; promises hold at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self.faults: Faults | None = None

    @initialize(
        seed=st.integers(0, 10_000),
        members=st.integers(2, 4),
        route=st.sampled_from(("relay", "direct", "auto")),
        beside=st.booleans(),
    )
    def begin(self, seed: int, members: int, route: str, beside: bool) -> None:
        setting = Setting(members=members, route=route, rounds=8, reducers_beside_hub=beside)
        self.world = self._stack.enter_context(simulated(f"machine:{seed}", setting))
        self.faults = Faults(self.world)
        self.world.begin()
        self.world.run(limit_s=1.5)

    @rule(seconds=st.sampled_from((0.05, 0.2, 0.6, 2.0, 7.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.run(limit_s=seconds)

    @rule(fault=st.sampled_from(FAULTS), role=st.sampled_from(("worker", "worker", "reducer")))
    def something_strikes(self, fault: str, role: str) -> None:
        self._strike(fault, role)

    @rule(fault=st.sampled_from(FAULTS))
    def hub_is_struck(self, fault: str) -> None:
        self._strike(fault, "hub")

    @rule()
    def member_is_asked_to_leave(self) -> None:
        members = [member for member in self.world.members() if member.group is not None]
        if members and self.world.job_state() == "running":
            members[0].terminate()

    def _strike(self, fault: str, role: str) -> None:
        assert self.faults is not None
        target = target_of(self.world, role, self.world.nobody)
        if target is not None and target.running and self.world.job_state() == "running":
            self.faults.strike(fault, target)

    @invariant()
    def no_promise_is_broken(self) -> None:
        if self.faults is not None:
            assert not self.world.oracle.broken, self._explain()

    def _explain(self) -> str:
        return "\n".join([*self.world.oracle.broken, *self.world.trace[-60:]])

    def teardown(self) -> None:
        try:
            if self.faults is not None and not self.world.oracle.broken:
                self._end(self.faults)
        finally:
            self._stack.close()

    def _end(self, faults: Faults) -> None:
        world = self.world
        ended = False
        while not ended and world.scheduler.now < faults.over + PATIENCE_S:
            ended = world.run(limit_s=20.0)
        finish(world, ended=ended)
        assert not world.oracle.broken, self._explain()


Cluster.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=12, deadline=None,
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip
TestCluster = Cluster.TestCase
