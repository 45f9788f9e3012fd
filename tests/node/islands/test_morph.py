"""Living ranks go on in other places; the rest are started or killed. Real processes, no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config import RankPlace
from atoll.island.morph_orders import MorphOrder, Orders, give_order
from atoll.node.islands.failure_cause import RankExit
from atoll.node.islands.local_ranks import LocalRanks
from tests.node.islands.island_machines import alive, kill
from tests.node.launchers.ordering import run, until

RANK = """
import json, os, pathlib, sys
mine = pathlib.Path(sys.argv[1], str(os.getpid()))
def tell(*words):
    mine.with_suffix(".part").write_text(" ".join(words))
    mine.with_suffix(".part").replace(mine)
tell(os.environ["RANK"], os.environ["MASTER_PORT"], os.environ["ATOLL_SPEC"])
for line in sys.stdin:
    order = json.loads(line)
    tell(str(order["place"]["rank"]), str(order["place"]["port"]), order["spec"])
    print("order", order["number"], order["planned"], flush=True)
"""


class Island:
    """Ranks on this machine, and what they have told of their places."""

    def __init__(self, folder: Path) -> None:
        self.told, self.ends = folder / "told", list[RankExit]()
        self.told.mkdir()
        program = (sys.executable, "-c", RANK, str(self.told))
        self.ranks = LocalRanks(folder, program=program, on_end=self.ends.append)

    def form(self, ranks: int, *, port: int, planned: bool = False) -> dict[int, int]:
        """Start so many ranks; return their process ids when all have their places.

        The port is the number of the start, too.
        """
        places = [RankPlace(rank, ranks, rank, "127.0.0.1", port) for rank in range(ranks)]
        spec = self.told.parent / f"{port}.toml"
        self.ranks.start(
            places, own_address="127.0.0.1", spec_file=spec, number=port, ordered=True,
            planned=planned,
        )  # fmt: skip

        def found() -> dict[int, int]:
            words = {int(p.name): p.read_text().split() for p in self.told.glob("*[0-9]")}
            there = {pid: w for pid, w in words.items() if w[1:] == [str(port), str(spec)]}
            return {int(w[0]): pid for pid, w in there.items()}

        run(until(lambda: len(found()) == ranks))
        return found()


def test_living_processes_take_the_places_of_the_next_mesh(tmp_path: Path) -> None:
    island = Island(tmp_path)
    try:
        first = island.form(3, port=1)
        kill(first[1])
        run(until(lambda: bool(island.ends)))
        second = island.form(2, port=2)
        assert second == {0: first[0], 1: first[2]}, "its own place, or else one that is free"
        third = island.form(3, port=3)
        assert {rank: third[rank] for rank in second} == second
        assert third[2] not in first.values()
        last = island.form(1, port=4)
        assert last == {0: first[0]}
        run(until(lambda: not island.ranks.lives(1) and not island.ranks.lives(2)))
        kill(last[0])
        run(until(lambda: len(island.ends) > 1))
        assert [(end.rank, end.code) for end in island.ends] == [(1, -9), (0, -9)]
    finally:
        island.ranks.close()


def test_ranks_without_a_place_in_a_planned_start_end(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    island = Island(tmp_path)
    try:
        first = island.form(3, port=1)
        second = island.form(2, port=2, planned=True)
        assert second == {rank: first[rank] for rank in (0, 1)}
        run(until(lambda: not alive(first[2])))
        assert island.ends == [], "its end is none of the island's"
        island.ranks.release()  # the island goes on without this machine
        run(until(lambda: len(island.ends) == 2))
        assert [end.code for end in island.ends] == [0, 0]
        third = island.form(2, port=3)
        assert not set(third.values()) & set(first.values()), "those that end take no place"
    finally:
        island.ranks.close()
    assert capfdbinary.readouterr().out.count(b"order 2 True") == 2


def test_orders_are_taken_by_number_or_after_a_loss() -> None:
    read, write = os.pipe()
    lost, own = RuntimeError("Connection closed by peer"), ValueError("its own fault")
    with open(write, "wb") as supervisor:
        orders = Orders(read)
        assert orders.newest is None
        places = {n: RankPlace(0, n, 0, "127.0.0.1", n) for n in range(1, 5)}
        for number, place in places.items():
            order = MorphOrder(number, place, f"{number}.toml", planned=number != 3)
            give_order(supervisor, order)
        run(until(lambda: orders.newest and orders.newest.number == 4))
        assert orders.after(own) is None
        taken = orders.take(1)
        assert taken
        assert taken.place == places[1]
        lossy = orders.after(lost)
        assert lossy
        assert (lossy.number, lossy.spec) == (3, "3.toml"), "2 was for ranks that live"
        assert orders.newest
        assert orders.newest.number == 4
    assert orders.take(5) is None, "no more can come"
    assert orders.after(lost) is None
    os.close(read)


@pytest.mark.parametrize(
    ("error", "given", "spec"),
    [
        ("RuntimeError('Connection closed by peer')", "order", "b.toml"),
        ("RuntimeError('Connection closed by peer')", "", "None"),  # no island that morphs
        ("ValueError('its own fault')", "order", "None"),
    ],
)
def test_only_the_loss_of_another_rank_is_followed_by_an_order(
    error: str, given: str, spec: str
) -> None:
    place = '{"rank":1,"ranks":2,"local_rank":1,"address":"h","port":5}'
    order = f'{{"number":1,"place":{place},"spec":"b.toml"}}\n' if given else ""
    script = (
        f"from {Orders.__module__} import Orders\n"
        f"found = Orders().after({error})\n"
        "print(found and found.spec, found.place.rank if found else None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=order, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [spec, "None" if spec == "None" else "1"]
