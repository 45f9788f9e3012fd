"""What always holds of rounds, whatever happens to their members and their hub."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounds.group_model import Group
from tests.tiers import examples

ACTIONS = st.tuples(
    st.sampled_from(
        ["go"] * 8
        + ["all"] * 4
        + ["wait", "wait", "die", "relaunch", "relaunch", "freeze", "leave", "restart", "again"]
        + ["save", "cut", "mend", "mend"]
    ),
    st.integers(0, 3),
    st.sampled_from([True, True, True, True, False]),
)

SCHEDULES = st.lists(ACTIONS, max_size=80)


def play(actions: list[tuple[str, int, bool]], *, least: int = 0) -> Group:
    """Play a schedule; the model checks every plan and every verdict on the way."""
    group = Group(4, least)
    for action, slot, good in actions:
        group.act(action, f"w{slot}", good)
    return group


@settings(max_examples=examples(200), deadline=None)
@given(SCHEDULES)
def test_epoch_has_one_verdict_and_equal_replicas(
    actions: list[tuple[str, int, bool]],
) -> None:
    group = play(actions)
    held = list(group.machine.commit_log.data_slots.held.values())
    assert len(held) == len(set(held))


@settings(max_examples=examples(150), deadline=None)
@given(SCHEDULES)
def test_nobody_waits_for_ever_once_time_passes(actions: list[tuple[str, int, bool]]) -> None:
    group = play(actions)
    group.machine.reducer_ready = True
    for _ in range(80):
        group.wait(8.0)
        if not any(p.doing == "joining" for p in group.processes.values()):
            break
    assert not [m for m, p in group.processes.items() if p.doing == "joining" and not p.frozen]


@settings(max_examples=examples(150), deadline=None)
@given(SCHEDULES, st.integers(0, 3))
def test_surviving_members_commit_together(
    actions: list[tuple[str, int, bool]], survivor: int
) -> None:
    group = play(actions)
    group.machine.reducer_ready = True
    group.relaunch(f"w{survivor}")
    for process in group.processes.values():
        process.frozen = False
    before = len(group.verdicts)
    for _ in range(100):
        for member in list(group.processes):
            group.step(member, good=True)
        group.wait(2.0)
    last = max(group.verdicts)
    assert last > before
    assert group.verdicts[last].committed
    assert set(group.verdicts[last].contributors) == set(group.processes)
    assert len({process.state for process in group.processes.values()}) <= 2


@settings(max_examples=examples(200), deadline=None)
@given(SCHEDULES)
def test_fewer_than_the_least_number_of_members_never_meet(
    actions: list[tuple[str, int, bool]],
) -> None:
    assert play(actions, least=2).least == 2
