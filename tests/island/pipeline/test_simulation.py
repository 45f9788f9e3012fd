"""Simulated batches: closed forms, lower bounds, orders, shared cores and links."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.pipeline.hosts import Host, Hosts, Link
from atoll.strategies.inner.pipeline.simulation import Kind, Simulated, StageTimes, Task, simulate

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
ANY = [*SHAPES, ("opportunistic", 1)]


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bubbles_and_kept_inputs_are_those_of_the_closed_forms(
    schedule: str, chunks: int, count: int, backward: float
) -> None:
    shape = PipelineShape(schedule, count, chunks)
    able = [m for m in range(1, 21) if shape.works_with(m)]
    assert able
    times = StageTimes(forward_s=[1.0] * shape.stages, backward_s=[backward] * shape.stages)
    for number in able:
        played = simulate(shape, times, microbatches=number)
        work = number * chunks * (1.0 + backward)
        assert played.busy_s == pytest.approx([work] * count)
        assert played.bubble == pytest.approx(shape.bubble(number))
        assert played.wall_s == pytest.approx(work * (1.0 + shape.overhead(number)))
        held = [shape.held(rank, microbatches=number) for rank in range(count)]
        assert list(played.held) == held
        if schedule == "1f1b":
            assert held == [min(count - rank, number) for rank in range(count)]


def even(stages: int, **more: Any) -> StageTimes:
    return StageTimes(forward_s=[1.0] * stages, backward_s=[2.0] * stages, **more)


def test_unlike_stages_and_slow_links_cost_more() -> None:
    shape = PipelineShape("1f1b", 3)
    fast = simulate(shape, even(3), microbatches=6)
    times = StageTimes(forward_s=[1, 2, 1], backward_s=[2, 4, 2])
    uneven = simulate(shape, times, microbatches=6)
    far = simulate(shape, even(3), microbatches=6, hosts=Hosts(near=Link(latency_s=0.5)))
    assert fast.bubble == pytest.approx(2 / 8)
    # Before the slow stage works, after it, and once, early, when it waits for a first gradient.
    assert uneven.wall_s == pytest.approx(1 + 6 * (2 + 4) + 2 + 1)
    assert far.wall_s > fast.wall_s
    assert far.busy_s == fast.busy_s


def test_ranks_on_shared_cores_take_turns() -> None:
    shape = PipelineShape("1f1b", 2)
    alone = simulate(shape, even(2), microbatches=4)
    one = simulate(shape, even(2), microbatches=4, hosts=Hosts(hosts=(Host(cores=1),)))
    assert alone.wall_s == pytest.approx(4 * 3 + 3)
    assert one.wall_s == pytest.approx(2 * 4 * 3)  # all the work, one after the other
    two_rows = Hosts(hosts=(Host(cores=2),), of_rank=(0, 0, 0, 0))
    shared = simulate(shape, even(2), microbatches=4, hosts=two_rows)
    assert shared.wall_s == pytest.approx(one.wall_s)
    slow = Hosts(hosts=(Host(speed=0.5),))
    assert simulate(shape, even(2), microbatches=4, hosts=slow).wall_s == 2 * alone.wall_s


def test_measured_rates_overrule_the_number_of_cores() -> None:
    shape = PipelineShape("1f1b", 2)
    host = Host(cores=1, speed=2.0, rates=(0.5, 0.25))
    assert [host.rate(n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]  # 4 do no more than 2 together
    found = simulate(shape, even(2), microbatches=4, hosts=Hosts(hosts=(host,)))
    assert found.wall_s == pytest.approx(2 * 4 * 3)  # all the work, as if one after the other
    crowded = Host(cores=2, rates=(1.0, 0.25))
    more = simulate(shape, even(2), microbatches=4, hosts=Hosts(hosts=(crowded,)))
    # Seconds in which both compute count twice.
    both_s = sum(more.busy_s) - more.wall_s
    assert both_s > 0
    assert more.wall_s == pytest.approx(found.wall_s + both_s / 2)


def test_transfers_cost_both_sides_processor_time() -> None:
    shape = PipelineShape("1f1b", 2)
    times = even(2, sent_bytes=[10])
    link = Link(busy_s=0.1, busy_s_per_byte=0.04)
    free = simulate(shape, times, microbatches=4)
    near = simulate(shape, times, microbatches=4, hosts=Hosts(near=link))
    hosts = Hosts(hosts=(Host(), Host()), of_rank=(0, 1), far=link)
    assert near.busy_s == pytest.approx([busy_s + 2 * 4 * 0.5 for busy_s in free.busy_s])
    assert simulate(shape, times, microbatches=4, hosts=hosts) == near
    middle = simulate(PipelineShape("1f1b", 3), even(3), microbatches=4, hosts=Hosts(near=link))
    assert middle.busy_s == pytest.approx([12 + 2 * 4 * c for c in (0.1, 0.2, 0.1)])
    only = simulate(PipelineShape("interleaved", 1, 2), even(2), microbatches=4,
                    hosts=Hosts(near=link))  # fmt: skip
    assert only.busy_s == pytest.approx([2 * 12])  # nothing leaves the rank


def test_transfers_share_the_link_of_a_host_and_wait_for_a_place() -> None:
    shape = PipelineShape("gpipe", 2)
    times = StageTimes(forward_s=[0, 0], backward_s=[1, 1], sent_bytes=[10])

    def first_backward(link: Link) -> float:
        hosts = Hosts(hosts=(Host(), Host()), of_rank=(0, 1), far=link)
        found = simulate(shape, times, microbatches=4, hosts=hosts)
        return found.wall_s - found.busy_s[1]

    # Four activations of 10 bytes arrive after 40 bytes; then 4 s of work on the last rank, of
    # which the last gradient is sent back, and one backward pass.
    assert first_backward(Link(bytes_per_s=10.0)) == pytest.approx(4 + 1 + 1)
    assert first_backward(Link(bytes_per_s=10.0, concurrent=1)) == pytest.approx(4 + 1 + 1)
    waits = Link(latency_s=1.0, bytes_per_s=10.0, concurrent=1)
    # One at a time, there and back: the gradients are ready faster than they leave.
    assert first_backward(waits) == pytest.approx(4 * 2 + (1 + 4 * 2) + 1 - 4)
    assert first_backward(Link(latency_s=1.0, bytes_per_s=10.0)) == pytest.approx(1 + 4 + 2 + 1)


def test_recomputing_before_the_gradient_comes_saves_its_time() -> None:
    shape = PipelineShape("1f1b", 4)
    times = even(4, recompute_s=[1.0] * 4)
    strict = simulate(shape, times, microbatches=8)
    ahead = simulate(shape, times, microbatches=8, early=True)
    assert strict.wall_s == pytest.approx(4 * (8 + 3))
    assert ahead.wall_s < strict.wall_s - 4
    kinds = [task.kind for task in ahead.done[-1]]
    assert Kind.RECOMPUTE not in kinds  # the last stage has just computed what it needs


def test_ready_forwards_go_before_late_gradients() -> None:
    shape, link = PipelineShape("1f1b", 2), Link(latency_s=4.0)
    times = even(2, recompute_s=[1.0] * 2)
    found = simulate(shape, times, microbatches=6, hosts=Hosts(near=link), early=True)
    first = [task.kind for task in found.done[0][:4]]
    assert first.count(Kind.FORWARD) > 2
    strict = simulate(shape, times, microbatches=6, hosts=Hosts(near=link))
    assert found.wall_s < strict.wall_s


COSTS = st.integers(1, 8) | st.floats(0.1, 5.0)


@st.composite
def runs(draw: st.DrawFn) -> tuple[PipelineShape, StageTimes, int, Hosts, bool]:
    """Return a pipeline, anything that it can be and run on."""
    schedule, chunks = draw(st.sampled_from(ANY))
    shape = PipelineShape(schedule, draw(st.integers(1, 4)), chunks)
    number = draw(st.sampled_from([m for m in range(1, 13) if shape.works_with(m)]))
    costs = st.lists(COSTS, min_size=shape.stages, max_size=shape.stages)
    times = StageTimes(
        forward_s=draw(costs), backward_s=draw(costs),
        recompute_s=draw(st.just([]) | costs), sent_bytes=draw(st.just([]) | costs),
    )  # fmt: skip
    rows = draw(st.integers(1, 2))
    links = st.builds(
        Link, st.floats(0, 2), st.sampled_from([math.inf, 1.0, 7.0]), st.integers(1, 4)
    )
    machines = st.builds(
        Host, st.sampled_from([math.inf, 1.0, 2.0]), st.sampled_from([1.0, 0.5, 2.0])
    )
    ranks = rows * shape.ranks
    hosts = Hosts(
        hosts=(draw(machines), draw(machines)),
        of_rank=tuple(draw(st.lists(st.integers(0, 1), min_size=ranks, max_size=ranks))),
        near=draw(links), far=draw(links),
    )  # fmt: skip
    return shape, times, number, hosts, schedule == "1f1b" and draw(st.booleans())


def work_of(found: Simulated, rank: int, times: StageTimes, *, apart: bool) -> float:
    return sum(
        times.of(task)
        + (
            times.recompute_s[task.stage]
            if times.recompute_s and task.kind == Kind.BACKWARD and not apart
            else 0.0
        )
        for task in found.done[rank]
    )


@given(runs())
def test_simulated_batches_keep_lower_bounds_orders_and_memory(
    run: tuple[PipelineShape, StageTimes, int, Hosts, bool],
) -> None:
    shape, times, number, hosts, ahead = run
    found = simulate(shape, times, microbatches=number, hosts=hosts, early=ahead)
    assert simulate(shape, times, microbatches=number, hosts=hosts, early=ahead) == found
    work = [work_of(found, rank, times, apart=ahead) for rank in range(len(hosts.of_rank))]
    at = [hosts.hosts[host] for host in hosts.of_rank]
    longest = max(w / host.speed for w, host in zip(work, at, strict=True))
    assert found.wall_s >= longest - 1e-6
    for host in {0, 1}:  # a host cannot do more than its cores
        total = sum(w for w, at in zip(work, hosts.of_rank, strict=True) if at == host)
        able = hosts.hosts[host].speed * hosts.hosts[host].cores
        assert found.wall_s >= total / able - 1e-6
    fastest = max(host.speed for host in hosts.hosts)
    path = sum(times.forward_s) + sum(times.backward_s)  # one microbatch, there and back
    least = min(hosts.near.latency_s, hosts.far.latency_s) if shape.ranks > 1 else 0.0
    assert found.wall_s >= path / fastest + 2 * (shape.stages - 1) * least - 1e-6
    for rank, (done, busy_s) in enumerate(zip(found.done, found.busy_s, strict=True)):
        assert busy_s <= found.wall_s + 1e-6
        greedy = shape.schedule == "opportunistic"
        _check_order(shape, done, rank % shape.ranks, number, ahead=ahead or greedy)
        bound = number if ahead else shape.held(rank % shape.ranks, microbatches=number)
        assert found.held[rank] <= bound


def _check_order(
    shape: PipelineShape, done: tuple[Task, ...], rank: int, number: int, *, ahead: bool
) -> None:
    passes = [task for task in done if task.kind != Kind.RECOMPUTE]
    expected = [
        Task(Kind.FORWARD if work.forward else Kind.BACKWARD, work.stage, work.microbatch)
        for work in shape.order(rank, microbatches=number)
    ]
    if not ahead:
        assert passes == expected
        return
    for kind in (Kind.FORWARD, Kind.BACKWARD):  # each keeps its order among its like
        assert [t for t in passes if t.kind == kind] == [t for t in expected if t.kind == kind]
    for place, task in enumerate(done):
        if task.kind == Kind.RECOMPUTE:  # one at a time is in memory
            assert done[place + 1] == Task(Kind.BACKWARD, task.stage, task.microbatch)
            assert Task(Kind.FORWARD, task.stage, task.microbatch) in done[:place]


@given(
    st.integers(2, 4), st.integers(1, 12), st.floats(0.5, 2), st.floats(0, 6),
    st.lists(st.floats(0.8, 1.2), min_size=4, max_size=4),
)  # fmt: skip
def test_an_opportunistic_order_is_hardly_ever_slower(
    count: int, number: int, backward: float, latency_s: float, costs: list[float]
) -> None:
    costs = costs[:count]
    times = StageTimes(forward_s=costs, backward_s=[backward * cost for cost in costs])
    hosts = Hosts(of_rank=(0,) * count, near=Link(latency_s=latency_s))
    number = max(count, number)
    strict, found = (
        simulate(PipelineShape(name, count), times, microbatches=number, hosts=hosts).wall_s
        for name in ("1f1b", "opportunistic")
    )
    # A pass that was begun before a gradient came may hold that up, by no more than itself.
    assert found <= strict + max(costs)


def test_a_slow_link_is_hidden_by_passes_that_are_ready() -> None:
    times, hosts = even(2), Hosts(of_rank=(0, 0), near=Link(latency_s=2.0))
    strict, found = (
        simulate(PipelineShape(name, 2), times, microbatches=8, hosts=hosts)
        for name in ("1f1b", "opportunistic")
    )
    assert found.wall_s < 0.75 * strict.wall_s
    assert found.held[0] == PipelineShape("opportunistic", 2).held(0, microbatches=8) == 4


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="before the gradient"):
        simulate(PipelineShape("gpipe", 2), even(2), microbatches=2, early=True)
    with pytest.raises(ConfigError, match=r"3 ranks in rows of 2"):
        simulate(PipelineShape("1f1b", 2), even(2), microbatches=2, hosts=Hosts(of_rank=(0, 0, 0)))
    with pytest.raises(ConfigError, match="1 microbatches"):
        simulate(PipelineShape("1f1b", 2), even(2), microbatches=1)
