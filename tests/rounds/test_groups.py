"""Several groups of one job, each in rounds of its own."""

from __future__ import annotations

from atoll.rounds.effects import Decided, Planned, Refused
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import RoundJoin, RoundPlan, RoundVote


def group(number: int, *members: str, groups: int = 3) -> RoundMachine:
    machine = RoundMachine("j", nodes_wanted=1, starting=False, group=number, groups=groups)
    machine.epoch, machine.whole, machine.required = number, True, frozenset(members)
    machine.reducer_ready = True
    for member in members:
        machine.launch(member)
        machine.register(member, dial=[])
    return machine


def planned(machine: RoundMachine, *members: str, now: float = 0.0) -> RoundPlan:
    effects = [e for m in members for e in machine.join(m, RoundJoin(0, "b"), now)]
    (plan,) = [effect.plan for effect in effects if isinstance(effect, Planned)]
    return plan


def vote(plan: RoundPlan, *contributors: str) -> RoundVote:
    return RoundVote(plan.round, plan.epoch, True, "d", list(contributors or plan.members))


def test_epochs_of_groups_never_meet() -> None:
    epochs = []
    for number in range(3):
        machine = group(number, "w0")
        for round_ in range(4):
            (effect,) = [
                e for e in machine.join("w0", RoundJoin(round_, "b"), 0.0) if isinstance(e, Planned)
            ]
            epochs.append(effect.plan.epoch)
            assert effect.plan.group == number
            (decided,) = [
                e for e in machine.vote("w0", vote(effect.plan), 0.0) if isinstance(e, Decided)
            ]
            assert (decided.verdict.committed, decided.verdict.group) == (True, number)
    assert len(set(epochs)) == 12


def test_no_round_is_planned_without_those_it_requires() -> None:
    machine = group(0, "w0", "w1")
    machine.join("w0", RoundJoin(0, "b"), 0.0)
    machine.gone("w1", 1.0)
    assert machine.plan is None
    machine.required = frozenset({"w0"})
    machine.settle(1000.0)
    assert machine.plan is not None


def test_a_whole_round_aborts_if_a_member_is_lost() -> None:
    machine = group(0, "w0", "w1")
    plan = planned(machine, "w0", "w1")
    machine.vote("w0", vote(plan, "w0"), 1.0)
    (decided,) = [e for e in machine.gone("w1", 2.0) if isinstance(e, Decided)]
    assert not decided.verdict.committed
    assert "without the contribution of w1" in decided.verdict.reason


def test_a_member_lost_after_its_contribution_harms_nothing() -> None:
    machine = group(0, "w0", "w1")
    plan = planned(machine, "w0", "w1")
    machine.vote("w0", vote(plan), 1.0)
    (decided,) = [e for e in machine.gone("w1", 2.0) if isinstance(e, Decided)]
    assert decided.verdict.committed


def test_guests_never_meet_without_another_member() -> None:
    machine = group(0, "w0", "w1", "w2")
    machine.required, machine.guests = frozenset(), frozenset({"w0"})
    machine.join("w0", RoundJoin(0, "b"), 0.0)
    assert machine.settle(1000.0) == [], "nor are others given up, however slow they are"
    assert machine.join("w1", RoundJoin(0, "b"), 1001.0) == [], "they wait for each other from now"
    machine.join("w2", RoundJoin(0, "b"), 1002.0)
    assert machine.plan is not None
    assert machine.plan.members == ["w0", "w1", "w2"]


def test_another_state_of_guests_gives_way() -> None:
    """Though they are more: the others' is the one that all stages went back to."""
    machine = group(0, "w0", "w1", "w2")
    machine.required, machine.guests = frozenset(), frozenset({"w0", "w1"})
    joins = {"w0": "later", "w1": "later", "w2": "now"}
    effects = [e for m, base in joins.items() for e in machine.join(m, RoundJoin(0, base), 0.0)]
    assert [e.member for e in effects if isinstance(e, Refused)] == ["w0", "w1"]
    assert machine.plan is not None
    assert machine.plan.members == ["w2"]
