"""Whatever happens to the members of a job, in any order, its rounds stay in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.rounds.effects import Decided, Effect, Planned
from atoll.wire.messages import RoundJoin, Verdict
from tests.rounds.rounds_by_hand import rounds_of, vote
from tests.tiers import examples


class Model:
    """Members that do as the protocol says, whatever happens to them."""

    def __init__(self, count: int) -> None:
        self.machine = rounds_of(count)
        self.now = 0.0
        self.alive = {f"w{slot}" for slot in range(count)}
        self.decided: dict[int, Verdict] = {}
        self.epochs: list[int] = []
        self.commits: list[int] = []

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Planned):
                self.epochs.append(effect.plan.epoch)
                assert set(effect.plan.members) <= self.alive
            elif isinstance(effect, Decided):
                assert effect.verdict.epoch not in self.decided
                self.decided[effect.verdict.epoch] = effect.verdict
                if effect.verdict.committed:
                    self.commits.append(effect.verdict.round)

    def restart(self) -> None:
        old = self.machine
        self.machine = rounds_of(old.nodes_wanted)
        self.machine.committed_round, self.machine.epoch = old.committed_round, old.epoch
        self.machine.starting = old.starting
        for member in list(self.machine.members.states):
            if member not in self.alive:
                self.machine.gone(member, self.now)
        if old.plan is not None:
            self.machine.reopen(old.plan, self.now)
            for member in sorted(set(old.plan.members) - self.alive):
                self.take(self.machine.gone(member, self.now))

    def act(self, action: str, member: str, good: bool) -> None:
        machine = self.machine
        if action == "wait":
            self.now += 40.0
            self.take(machine.settle(self.now))
        elif action == "restart":
            self.restart()
        elif action == "die":
            self.alive.discard(member)
            self.take(machine.gone(member, self.now))
        elif action == "reducer":
            self.take(machine.reducer(self.now, ready=good))
        elif member in self.alive and machine.attends(member):
            plan = machine.plan
            assert plan is not None
            self.take(machine.vote(member, vote(plan, ok=good), self.now))
        elif member in self.alive:
            self.take(machine.join(member, RoundJoin(machine.committed_round, "b"), self.now))


ACTIONS = st.tuples(
    st.sampled_from(["go", "go", "go", "go", "wait", "die", "restart", "reducer"]),
    st.integers(0, 3),
    st.sampled_from([True, True, True, False]),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_epochs_grow_and_rounds_commit_once_in_order(
    actions: list[tuple[str, int, bool]],
) -> None:
    model = Model(4)
    for action, slot, good in actions:
        model.act(action, f"w{slot}", good)
    assert model.epochs == sorted(set(model.epochs))
    assert model.commits == list(range(len(model.commits)))
    assert model.machine.committed_round == len(model.commits)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.integers(0, 3))
def test_whatever_happened_a_survivor_still_commits(
    actions: list[tuple[str, int, bool]], survivor: int
) -> None:
    model = Model(4)
    for action, slot, good in actions:
        if not (action == "die" and slot == survivor):
            model.act(action, f"w{slot}", good)
    model.act("reducer", "", True)
    before = len(model.commits)
    for _ in range(20):
        model.act("wait", "", True)
        for slot in range(4):
            model.act("go", f"w{slot}", True)
    assert len(model.commits) > before
