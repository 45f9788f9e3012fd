"""Every microbatch counts exactly once per stage, whatever happens, and the work goes on."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.swarm.places import SwarmSettings
from tests.swarm.simulated import World, calm_rate, check_counts, check_evaluations
from tests.swarm.simulated_member import SimMember
from tests.tiers import examples

SPEEDS = [0.01, 0.02, 0.03]


def swarm(
    members: int = 6, *, stages: int = 3, seed: int = 0, lossy: float = 0.0, **changes: object
) -> World:
    values = {"microbatches": 12, "rebalance_s": 20.0} | changes
    copies_s = values.pop("copies_s", 5.0)
    job = SwarmSettings(stages, **values)  # type: ignore[arg-type]
    world = World(job, Random(seed), lossy=lossy, copies_s=copies_s)  # type: ignore[arg-type]
    for number in range(members):
        world.add(f"w{number}", SPEEDS[number % 3])
    return world


@pytest.mark.parametrize(("agrees", "early"), [(True, 0), (True, 4), (True, 12), (False, 0)])
@pytest.mark.every(3)
def test_a_calm_swarm_counts_everything_once(agrees: bool, early: int) -> None:
    world = swarm(agrees=agrees, early=early)
    world.run_to_step(10, limit_s=300)
    assert world.ledger.step == 10
    check_counts(world)
    assert all(member.step >= 9 for member in world.members.values())


@pytest.mark.parametrize("lossy", [0.0, 0.1])
@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.every(3)
def test_states_are_measured_at_start_between_and_end(agrees: bool, lossy: float) -> None:
    world = swarm(agrees=agrees, lossy=lossy, steps=6)
    world.held_out, world.evaluated_every = (5, 9), 3
    world.run_to_step(6, limit_s=300)
    world.run(world.now + 300.0)
    assert [one.step for one in world.evaluations] == [0, 3, 6]
    assert [one.last for one in world.evaluations] == [False, False, True]
    check_evaluations(world)
    world.ledger.saves.complete(6, 0)
    assert world.ledger.finished


def test_kills_in_the_last_evaluation_measure_nothing_twice() -> None:
    world = swarm(9, steps=2)
    world.held_out = (5, 40)
    world.run_to_step(2, limit_s=300)
    while len(world.ledger.evaluations.counted) < 10:
        world.run(world.now + 0.05)
    for stage in range(3):
        world.kill(world.ledger.serving(stage)[0].holder.member, noticed_s=0.1)
    world.run(world.now + 0.2)
    assert 10 <= len(world.ledger.evaluations.counted) < 40
    world.restart()
    world.run(world.now + 300.0)
    assert [one.step for one in world.evaluations] == [0, 2]
    check_evaluations(world)


def test_one_member_per_stage_computes_nothing_twice() -> None:
    world = swarm(3, microbatches=8)
    world.run_to_step(5, limit_s=300)
    check_counts(world)
    # 5 steps of 8 microbatches: forward and backward, or both at once in the last stage
    computed = {m.stage: m.computed for m in world.members.values()}
    assert computed == {0: 80, 1: 80, 2: 40}


def test_one_stage_alone_works_without_neighbours() -> None:
    world = swarm(3, stages=1)
    world.run_to_step(5, limit_s=300)
    assert world.ledger.step == 5
    check_counts(world)


def test_members_of_a_stage_take_work_by_their_speed() -> None:
    world = World(SwarmSettings(2, 64), Random(0))
    for name, row_s in {"w0": 0.002, "w1": 0.01, "w2": 0.002, "w3": 0.03}.items():
        world.add(name, row_s)
    world.run_to_step(2, limit_s=300)
    fast, slow = world.members["w1"], world.members["w3"]
    assert (fast.stage, slow.stage) == (1, 1)
    before = fast.computed, slow.computed
    world.run_to_step(12, limit_s=900)
    computed = fast.computed - before[0], slow.computed - before[1]
    assert computed[1] / sum(computed) == pytest.approx(0.25, abs=0.01)


faults = st.lists(
    st.tuples(
        st.floats(0.01, 3.0),
        st.sampled_from(["kill", "stage", "join", "part", "hub", "wait"]),
        st.integers(0, 7),
    ),
    max_size=12,
)


@settings(max_examples=examples(30), deadline=None)
@given(
    faults=faults,
    seed=st.integers(0, 1000),
    lossy=st.sampled_from([0.0, 0.02, 0.1]),
    form=st.sampled_from([(False, 0), (True, 0), (True, 2), (True, 5)]),
    copies_s=st.sampled_from([0.02, 0.2, 5.0]),
    save_every=st.sampled_from([1, 3]),
    held_out=st.sampled_from([(0, 0), (5, 9)]),
)
@pytest.mark.every(2)
def test_whatever_happens_every_microbatch_counts_once(
    faults: list[tuple[float, str, int]], seed: int, lossy: float, form: tuple[bool, int],
    copies_s: float, save_every: int, held_out: tuple[int, int],
) -> None:  # fmt: skip
    agrees, early = form
    world = swarm(
        seed=seed, lossy=lossy, agrees=agrees, early=early, copies_s=copies_s, microbatches=6,
        rebalance_s=5.0,
    )  # fmt: skip
    world.save_every, world.held_out = save_every, held_out
    for wait_s, fault, number in faults:
        world.run(world.now + wait_s)
        name = f"w{number}"
        alive = name in world.members and world.members[name].alive
        if fault == "kill" and alive:
            world.kill(name)
        elif fault == "stage":  # all that have its state
            for member in world.ledger.serving(number % world.settings.stages):
                world.kill(member.holder.member)
        elif fault == "join" and not alive:
            world.lose(name)
            world.add(name, SPEEDS[number % 3])
        elif fault == "part" and alive:
            world.lose(name)
        elif fault == "hub":
            world.restart()
        if agrees:
            check_counts(world)
    while sum(m.alive for m in world.members.values()) < 4:
        name = next(n for n in (f"w{k}" for k in range(8)) if not there(world, n))
        world.lose(name)
        world.add(name, 0.01)
    goal = world.ledger.step + 3  # whatever is under way ends, and work goes on
    world.run_to_step(goal, limit_s=world.now + 900)
    assert world.ledger.step >= goal
    check_evaluations(world)
    if agrees:
        check_counts(world)


def there(world: World, name: str) -> bool:
    return name in world.members and world.members[name].alive


def test_an_empty_stage_takes_a_spare_of_another() -> None:
    world = swarm(4, rebalance_s=0)
    world.run_to_step(2, limit_s=60)
    alone = next(m for m in world.members.values() if len(world.ledger.serving(m.stage)) == 1)
    world.kill(alone.name)
    world.run_to_step(6, limit_s=120)
    assert world.ledger.step == 6
    assert not world.ledger.paused()
    check_counts(world)


def test_without_a_spare_the_step_waits_for_a_member() -> None:
    world = swarm(3)
    world.run_to_step(2, limit_s=60)
    world.kill("w1")
    world.run(world.now + 30)
    step = world.ledger.step
    assert "no member serves stage 1" in world.ledger.paused()
    world.run(world.now + 30)
    assert world.ledger.step == step
    world.add("w1", 0.01)
    world.run_to_step(step + 3, limit_s=world.now + 60)
    assert world.ledger.step == step + 3
    check_counts(world)


def test_the_ledger_keeps_one_step_and_the_one_before() -> None:
    world = swarm(lossy=0.05)
    sizes = []
    for step in range(5, 40, 5):
        world.run_to_step(step, limit_s=2000)
        ledger = world.ledger
        logs = [*ledger.counts, *ledger.steps.before]
        sizes.append(sum(len(count.log) for count in logs) + len(ledger._leases))
        assert len(ledger.members) == 6
    assert max(sizes) <= 2 * 3 * 12 + 3 * 12
    drivers = [m.driver for m in world.members.values() if m.driver is not None]
    assert all(len(driver.holding) <= 12 for driver in drivers)


def rate(world: World, seconds: float, *, every_s: float = 0.0) -> float:
    """Run; kill a member in every period, which returns 5 s later; return microbatches per s."""
    start, started = progress(world), world.now
    number = 0
    while world.now < started + seconds:
        world.run(world.now + (every_s or seconds))
        if every_s:
            name = sorted(world.members)[number % len(world.members)]
            number += 1
            world.kill(name, noticed_s=1.0)
            row_s = world.members[name].row_s
            world.after(5.0, lambda name=name, row_s=row_s: world.add(name, row_s))  # type: ignore[misc]
    return (progress(world) - start) / (world.now - started)


def progress(world: World) -> float:
    """Return the microbatches that count, those of the present step as the mean of all stages."""
    counts, each = world.ledger.counts, world.settings.microbatches
    now = sum(each if count.agreed_by else len(count.counted) for count in counts) / len(counts)
    return world.ledger.step * each + now


def busy_swarm(microbatches: int, *, room: int) -> World:
    """Return 3 stages x 3 members of speeds 1 : 2 : 3, after they measured each other."""
    world = World(SwarmSettings(3, microbatches, rebalance_s=30.0), Random(1))
    for number in range(9):
        SimMember(world, f"w{number}", 10 * SPEEDS[number // 3], room=room).start()
    world.run(150.0)
    return world


@pytest.mark.long(
    "tests/swarm/test_simulated.py::test_a_failure_every_20_s_leaves_three_fifths_of_the_ideal"
)
def test_a_calm_swarm_reaches_most_of_the_ideal_rate() -> None:
    world = busy_swarm(192, room=12)
    reached = rate(world, 400.0) / calm_rate(world)
    assert reached >= 0.8, reached
    check_counts(world)


def test_a_failure_every_20_s_leaves_three_fifths_of_the_ideal() -> None:
    world = busy_swarm(192, room=12)
    ideal = calm_rate(world)
    reached = rate(world, 400.0, every_s=20.0) / ideal
    assert reached >= 0.6, reached
    check_counts(world)


@pytest.mark.long(
    "tests/swarm/test_simulated.py::test_a_failure_every_20_s_leaves_three_fifths_of_the_ideal"
)
def test_copies_of_sums_keep_long_steps_alive_under_churn() -> None:
    reached = []
    for copies_s in (5.0, 1e9):
        world = busy_swarm(192, room=12)
        world.copies_s = copies_s
        for member in world.members.values():
            member.copies.every_s = copies_s
        reached.append(rate(world, 300.0, every_s=20.0) / calm_rate(world))
        check_counts(world)
    assert reached[0] > 1.5 * reached[1]
