from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.swarm.rebalance import Move, Server, Stages, fill_empty, place, plan_moves

speeds = st.sampled_from([0.5, 1.0, 2.0, 4.0, 0.0])
layouts = st.lists(st.lists(speeds, min_size=1, max_size=4), min_size=2, max_size=4)


def stages(*rows: list[float]) -> Stages:
    """Return stages of members with these seconds per row."""
    return Stages(
        [[Server(f"s{s}m{m}", row_s) for m, row_s in enumerate(row)] for s, row in enumerate(rows)]
    )


def carried_out(before: Stages, moves: list[Move]) -> Stages:
    places = [list(servers) for servers in before.servers]
    speeds = before.speeds()
    for move in moves:
        server = next(s for s in places[move.source] if s.member == move.member)
        places[move.source].remove(server)
        row_s = before.cost(move.target) / speeds[move.member]
        places[move.target].append(Server(server.member, row_s, server.queue))
    known = [
        [Server(s.member, before.cost(n) / speeds[s.member]) for s in servers]
        for n, servers in enumerate(places)
    ]
    return Stages(known, before.costs)


@given(layouts)
def test_moves_raise_the_slowest_stage_and_empty_none(rows: list[list[float]]) -> None:
    before = stages(*rows)
    moves = plan_moves(before)
    if not moves:
        return
    after = carried_out(before, moves)
    assert all(after.servers)
    assert min(after.throughputs()) > min(before.throughputs())
    assert len({move.member for move in moves}) == len(moves)


@given(layouts)
def test_moves_end_where_no_further_plan_gains(rows: list[list[float]]) -> None:
    now = stages(*rows)
    for _ in range(20):
        moves = plan_moves(now)
        if not moves:
            break
        now = carried_out(now, moves)
    assert not plan_moves(now)


def test_a_member_of_the_fastest_stage_moves_to_the_slowest() -> None:
    assert plan_moves(stages([1.0, 1.0, 1.0], [1.0])) == [Move("s0m2", 0, 1)]


def test_two_equally_slow_stages_get_a_member_each() -> None:
    moves = plan_moves(stages([1.0], [1.0], [1.0, 1.0, 1.0, 1.0]))
    assert sorted(move.target for move in moves) == [0, 1]


def test_nothing_moves_where_nothing_would_improve() -> None:
    assert plan_moves(stages([1.0, 1.0], [1.0, 1.0])) == []
    assert plan_moves(stages([1.0], [4.0])) == []
    assert plan_moves(stages([1.0, 1.0], [1.0])) == []


def test_of_equal_members_the_one_with_the_shortest_queue_moves() -> None:
    full, short = Server("full", 1.0, queue=5), Server("short", 1.0, queue=1)
    found = plan_moves(Stages([[short, full, Server("b", 1.0, queue=9)], [Server("c", 1.0)]]))
    assert [move.member for move in found] == ["short"]


def test_costs_of_stages_decide_which_is_slow() -> None:
    layout = [[Server("a", 1.0), Server("b", 1.0)], [Server("c", 3.0), Server("d", 3.0)]]
    layout[0] += [Server("e", 1.0), Server("f", 1.0)]
    moves = plan_moves(Stages(layout, costs=[1.0, 3.0]))
    assert [move.target for move in moves] == [1, 1]


def test_a_stage_that_does_not_fit_a_member_is_no_target() -> None:
    small = [Server(name, 1.0, free_bytes=10) for name in "abc"]
    layout = Stages([small, [Server("d", 1.0)]], needs_bytes=[5, 20])
    assert plan_moves(layout) == []
    assert place(small[0], layout) == 0
    assert place(Server("e", free_bytes=3), layout) == -1


def test_an_empty_stage_gets_a_spare_of_the_strongest() -> None:
    layout = stages([1.0, 1.0], [], [0.5, 0.5, 0.5])
    assert [move.source for move in fill_empty(layout, [1])] == [2]
    assert fill_empty(stages([1.0], [], [1.0]), [1]) == []


def test_newcomers_go_to_the_slowest_stage() -> None:
    assert place(Server("new"), stages([1.0, 1.0], [1.0], [0.1])) == 1
    assert place(Server("new"), stages([1.0], [], [0.1])) == 1
