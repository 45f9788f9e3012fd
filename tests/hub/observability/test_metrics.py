"""Measurements: each stored once, history thinned but whole, latest values at hand."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from pathlib import Path

import pytest

from atoll.errors import LimitReached
from atoll.hub.observability import point_cursors
from atoll.hub.observability.metrics import MAX_NAMES, Metrics
from atoll.hub.observability.traffic import Bytes
from atoll.hub.stores import Stores
from atoll.wire.messages import Point
from tests.hub.durable import with_stores


def point(step: int, **values: float) -> Point:
    return Point(time=float(step), step=step, round=step // 10, values=values)


def test_points_sent_again_are_stored_once_even_over_a_restart(tmp_path: Path) -> None:
    points = [point(n, loss=float(n)) for n in range(1, 6)]

    async def first(stores: Stores) -> None:
        assert await stores.metrics.add("j", "w0", incarnation="i", seq=1, points=points[:3]) == 3

    async def second(stores: Stores) -> None:
        add = stores.metrics.add
        assert await add("j", "w0", incarnation="i", seq=2, points=points[1:]) == 5
        assert await add("j", "w0", incarnation="i", seq=1, points=points[:2]) == 5
        assert await add("j", "w0", incarnation="new", seq=1, points=[point(9, loss=0.0)]) == 1
        stored = await stores.metrics.read("j")
        assert [item["step"] for item in stored] == [1, 2, 3, 4, 5, 9]
        assert await stores.metrics.read("j", after=stored[3]["id"]) == stored[4:]
        lines = (tmp_path / "jobs" / "j" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 9]

    with_stores(tmp_path, first)
    with_stores(tmp_path, second)


def test_processes_of_a_member_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who names another process with every report fills the memory, and slows every sum."""
    monkeypatch.setattr(point_cursors, "MAX_PROCESSES", 3)

    async def test(stores: Stores) -> None:
        add = stores.metrics.add
        for number in range(3):
            one = point(1, sent_bytes=1.0)
            assert await add("j", "w0", incarnation=str(number), seq=1, points=[one]) == 1
        with pytest.raises(LimitReached, match="too many processes"):
            await add("j", "w0", incarnation="more", seq=1, points=[point(1, sent_bytes=1.0)])
        assert await add("j", "w0", incarnation="2", seq=2, points=[point(2, loss=1.0)]) == 2
        assert await add("j", "w1", incarnation="more", seq=1, points=[point(2, loss=1.0)]) == 1

    with_stores(tmp_path, test)


def test_the_newest_value_of_every_name_is_kept_over_a_restart(tmp_path: Path) -> None:
    async def first(stores: Stores) -> None:
        points = [point(1, loss=3.0, held_out_loss=4.0)] + [point(12, loss=2.0)] * 900
        await stores.metrics.add("j", "w0", incarnation="i", seq=1, points=points)
        await check(stores)

    async def check(stores: Stores) -> None:
        latest = stores.metrics.latest("j")["w0"]
        assert (latest.step, latest.round) == (12, 1)
        assert latest.values == {"loss": 2.0, "held_out_loss": 4.0}

    with_stores(tmp_path, first)
    with_stores(tmp_path, check)


def test_a_long_history_gets_coarser_but_never_shorter(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        metrics = Metrics(stores.database, jobs_dir=tmp_path / "jobs", max_points=100)
        for start in range(0, 2000, 20):
            points = [
                point(n, loss=1.0, **({"held_out_loss": 2.0} if n % 100 == 0 else {}))
                for n in range(start, start + 20)
            ]
            await metrics.add("j", "w0", incarnation="i", seq=start + 1, points=points)
        await metrics.add("j", "w1", incarnation="i", seq=1, points=[point(1, loss=1.0)])
        stored = await metrics.read("j", limit=5000)
        own = [item for item in stored if item["member"] == "w0"]
        plain = [item for item in own if "held_out_loss" not in item["values"]]
        assert len(plain) <= 100
        assert min(item["step"] for item in own) == 0
        assert max(item["step"] for item in own) == 1999
        steps = sorted(item["step"] for item in own)
        assert max(b - a for a, b in itertools.pairwise(steps)) < 400
        held_out = [item["step"] for item in own if "held_out_loss" in item["values"]]
        assert held_out == list(range(0, 2000, 100))
        assert len(stored) - len(own) == 1

    with_stores(tmp_path, test)


def test_a_loss_that_is_not_a_number_does_not_break_the_page(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        await stores.metrics.add(
            "j", "w0", incarnation="i", seq=1, points=[point(1, loss=math.nan)]
        )
        (stored,) = await stores.metrics.read("j")
        assert stored["values"] == {"loss": None}

    with_stores(tmp_path, test)


def test_names_over_the_bound_stay_in_the_file_with_one_event(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        many = {f"own/{n}": float(n) for n in range(MAX_NAMES + 5)}
        for seq in (1, 2):
            points = [point(seq, **many)]
            await stores.metrics.add("j", "w0", incarnation="i", seq=seq, points=points)
        for stored in await stores.metrics.read("j"):
            assert stored["values"] == dict(list(many.items())[:MAX_NAMES])
        lines = (tmp_path / "jobs" / "j" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["values"] for line in lines] == [many, many]
        (event,) = await stores.events.read("j")
        assert event["kind"] == "metric-names"
        assert f"own/{MAX_NAMES}" in event["text"]

    with_stores(tmp_path, test)


def test_a_failed_write_is_repeated_without_a_second_line(tmp_path: Path) -> None:
    async def test(stores: Stores) -> None:
        write = stores.database.write

        async def fail(fn: object) -> None:
            raise sqlite3.OperationalError("locked")

        stores.database.write = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(sqlite3.OperationalError):
            await stores.metrics.add("j", "w0", incarnation="i", seq=1, points=[point(1, new=2.0)])
        stores.database.write = write  # type: ignore[method-assign]
        await stores.metrics.add("j", "w0", incarnation="i", seq=1, points=[point(1, new=2.0)])
        assert [item["values"] for item in await stores.metrics.read("j")] == [{"new": 2.0}]
        lines = (tmp_path / "jobs" / "j" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 1

    with_stores(tmp_path, test)


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1e300])
def test_counts_that_cannot_be_do_not_spoil_a_nodes_total(tmp_path: Path, lie: float) -> None:
    async def test(stores: Stores) -> None:
        points = [point(1, sent_bytes=5.0, received_bytes=lie), point(2, sent_bytes=lie)]
        assert (
            await stores.metrics.add("j", "w0", incarnation="i", seq=1, points=points, node="lap1")
            == 2
        )
        assert stores.metrics.traffic.of_node("lap1") == Bytes(5.0, 0.0)
        assert stores.metrics.traffic.of_job("j") == Bytes(5.0, 0.0)

    with_stores(tmp_path, test)
