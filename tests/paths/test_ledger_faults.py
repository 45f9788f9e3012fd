"""Whatever is lost, and whenever: no path of a phase counts twice, and none is lost in silence."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.paths.layout import PathLayout
from tests.paths.world import World
from tests.tiers import examples

LAYOUTS = [
    PathLayout.of([2, 2]), PathLayout.of([1], copies=3), PathLayout.of([3, 1]), PathLayout.of([2]),
]  # fmt: skip
FAULTS = 150
QUIET, GRACE = 3_000, 500
"""Steps without faults in which a run must end, and after which a round goes on without the others:
a hub that is killed right after it noticed a loss may have to wait in one for that."""


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**32 - 1), layout=st.sampled_from(LAYOUTS),
    members=st.integers(1, 5), phases=st.integers(1, 8), rate=st.sampled_from([0.02, 0.1, 0.3]),
)  # fmt: skip
def test_no_path_counts_twice_or_is_lost_in_silence(
    seed: int, layout: PathLayout, members: int, phases: int, rate: float
) -> None:
    rng = random.Random(seed)
    world = World(rng, layout, members=members, phases=phases)
    for _ in range(FAULTS):
        if world.over:
            break
        step(world, faults=rng.random() < rate)
    for quiet in range(QUIET):
        if world.over:
            break
        for name in [*world.dead]:
            world.notice(name)
        for process in world.processes.values():
            process.asleep = False
        step(world, faults=False)
        if quiet % GRACE == GRACE - 1:
            for module in range(layout.num_modules):
                world.commit(module, short=True)
    assert world.over, "the run does not end"
    world.check_end()


def step(world: World, *, faults: bool) -> None:
    rng = world.rng
    name = rng.choice(world.names)
    if not faults:
        world.act(name)
        module = rng.randrange(world.layout.num_modules)
        world.commit(module)
        return
    fault = rng.choice(["kill", "notice", "asleep", "hub", "short"])
    if fault == "kill":
        world.kill(name)
    elif fault == "notice" and world.dead:
        world.notice(rng.choice(sorted(world.dead)))
    elif fault == "asleep":
        process = world.processes[name]
        process.asleep = not process.asleep
        if process.asleep:
            world.book.gone(name)
    elif fault == "hub":
        world.restart_hub()
    elif fault == "short":
        world.commit(rng.randrange(world.layout.num_modules), short=True)
