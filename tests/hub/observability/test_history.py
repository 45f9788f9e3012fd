"""The past gets coarser, never shorter, and stays small."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import VirtualClock
from atoll.errors import StorageFull
from atoll.hub.db.database import Database
from atoll.hub.nodes.sampler import HubSampler
from atoll.hub.observability import history as history_module
from atoll.hub.observability.history import DAY_S, HOUR_S, KEPT_S, SCHEMA, History
from atoll.hub.observability.metrics import CONDENSED_POINTS, MAX_POINTS, Metrics
from atoll.hub.observability.metrics import SCHEMA as METRICS_SCHEMA
from atoll.wire.messages import Point
from tests.hub.durable import with_stores

NODES, DAYS = 100, 31
STATS = {
    "cpu_percent": 41.0, "memory_percent": 63.0, "memory_free_bytes": 9.1e9, "load": 2.4,
    "disk_free_bytes": 2.1e11, "battery_percent": 88.0, "on_battery": 0.0, "gpu_percent": 97.0,
    "gpu_memory_used_bytes": 2.2e10, "latency_ms": 14.2, "up_bps": 9.4e7, "down_bps": 3.1e8,
    "reconnects": 3.0, "sent_bytes": 1.2e11, "received_bytes": 1.4e11,
}  # fmt: skip
MEMBER = {
    "loss": 2.345678901234, "grad_norm": 0.812345678, "tokens_per_s": 2143.2871, "lr": 4e-4,
    "tokens": 1.2e9, "wall_s": 86400.123456, "compute_s": 81111.123456, "sync_s": 4100.123456,
    "wait_s": 2100.123456, "send_s": 1800.123456, "checkpoint_s": 12.123456, "recovery_s": 0.0,
    "wasted_steps": 0.0, "pace": 1.0, "sent_bytes": 1.23456789e10, "received_bytes": 1.2345e10,
}  # fmt: skip


class Past:
    """A history in a file, at a time of its own."""

    def __init__(self, folder: Path, *, now: float = 1e9) -> None:
        self.clock = VirtualClock()
        self.clock.advance(now)
        self.database = Database(folder / "h.sqlite", schemas=[SCHEMA])
        self.history = History(self.database, clock=self.clock)

    def read(self, owner: str, *, span_s: float, points: int = 300) -> dict[str, Any]:
        now = self.clock.wall()
        return asyncio.run(self.history.read(owner, since=now - span_s, until=now, points=points))

    def flush(self) -> None:
        asyncio.run(self.history.flush())


@pytest.fixture
def past(tmp_path: Path) -> Any:
    made = Past(tmp_path)
    yield made
    made.database.close()


def test_bucket_has_count_minimum_mean_and_maximum(past: Past) -> None:
    now = past.clock.wall()
    for value in (1.0, 2.0, 6.0):
        past.history.note("node/a", now, {"load": value, "gone": None, "odd": math.nan})
    past.flush()
    past.history.note("node/a", now, {"load": 3.0})  # the same bucket, after it was written
    past.flush()
    for span_s, width in ((600, 10), (DAY_S, 600), (300 * DAY_S, 3_600)):
        found = past.read("node/a", span_s=span_s)
        assert found["bucket_s"] == width
        assert list(found["series"]) == ["load"]
        assert found["series"]["load"] == {"mean": [3.0], "min": [1.0], "max": [6.0], "count": [4]}


def test_what_comes_late_finds_its_bucket(past: Past) -> None:
    now = past.clock.wall()
    past.history.note("job/w0", now, {"loss": 2.0})
    past.flush()
    past.history.note("job/w0", now - 3 * HOUR_S, {"loss": 4.0})
    past.flush()
    found = past.read("job/w0", span_s=4 * HOUR_S, points=1000)
    assert (found["bucket_s"], found["series"]["loss"]["mean"]) == (60, [4.0, 2.0])
    assert found["times"][1] - found["times"][0] == 3 * HOUR_S


def test_a_spike_is_still_seen_when_the_fine_buckets_are_gone(past: Past) -> None:
    for minute in range(0, 60 * 24):
        past.history.note("node/a", past.clock.wall(), {"load": 900.0 if minute == 77 else 1.0})
        past.clock.advance(60)
    past.flush()
    past.clock.advance(100 * DAY_S)
    rows = "SELECT bucket_s, count(*) FROM history GROUP BY bucket_s"
    assert set(dict(past.database.read_now(lambda c: c.execute(rows).fetchall()))) == set(KEPT_S)
    asyncio.run(past.history.trim())
    kept = dict(past.database.read_now(lambda c: c.execute(rows).fetchall()))
    assert list(kept) == [3_600]
    found = past.read("node/a", span_s=110 * DAY_S, points=3000)
    assert len(found["times"]) in (24, 25)
    assert max(found["series"]["load"]["max"]) == 900.0
    assert sum(found["series"]["load"]["count"]) == 60 * 24


def test_a_failed_write_loses_nothing(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_figures: object) -> bytes:
        raise sqlite3.OperationalError("database or disk is full")

    past.history.note("node/a", past.clock.wall(), {"load": 2.0})
    with monkeypatch.context() as patched:
        patched.setattr(history_module, "_pack", full)
        past.flush()
    assert past.read("node/a", span_s=600)["times"] == []
    past.flush()
    assert past.read("node/a", span_s=600)["series"]["load"]["mean"] == [2.0]


def test_figures_noted_during_a_failed_write_add_to_the_others(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = past.database.write

    async def full(_work: object) -> None:
        past.history.note("node/a", past.clock.wall(), {"load": 4.0})
        raise StorageFull("no space is left")

    past.history.note("node/a", past.clock.wall(), {"load": 2.0})
    monkeypatch.setattr(past.database, "write", full)
    past.flush()
    monkeypatch.setattr(past.database, "write", write)
    past.flush()
    series = past.read("node/a", span_s=600)["series"]["load"]
    assert (series["count"], series["mean"]) == ([2], [3.0])


def test_names_that_others_choose_fill_nothing_up(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MAX_NAMES", 5)
    now = past.clock.wall()
    for number in range(20):
        past.history.note(f"job/w{number}", now, {f"name{n}": 1.0 for n in range(number)})
    past.flush()
    names = "SELECT count(*) FROM history_names"
    assert past.database.read_now(lambda c: c.execute(names).fetchone()) == (5,)
    assert len(past.read("job/w19", span_s=600)["series"]) == 5


def test_an_owner_does_not_use_up_all_names(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_NAMES", 8)
    monkeypatch.setattr(history_module, "MAX_NEW_NAMES", 6)
    past.history.note("node/odd", past.clock.wall(), {f"odd{n}": 1.0 for n in range(20)})
    past.flush()
    past.history.note("node/a", past.clock.wall(), {"load": 2.0})
    past.flush()
    assert list(past.read("node/a", span_s=600)["series"]) == ["load"]
    asyncio.run(past.history.forget("node/odd"))
    asyncio.run(past.history.trim())
    past.history.note("node/a", past.clock.wall(), {f"fan{n}": 3.0 for n in range(5)} | {"load": 4})
    past.flush()
    series = past.read("node/a", span_s=600)["series"]
    assert sorted(series) == [*(f"fan{n}" for n in range(5)), "load"]
    assert series["load"]["count"] == [2]


def test_nodes_are_sampled_and_their_number_bounds_the_cost(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        clock = VirtualClock()
        clock.advance(1e9)
        recording = HubSampler(stores, clock=clock)
        few = [("a", {"load": 1.0})]
        await recording.tick(few)
        clock.advance(9.0)
        assert recording._sample_at > clock.monotonic()  # not yet
        clock.advance(1.0)
        assert recording._sample_at <= clock.monotonic()
        await recording.tick((f"n{number}", {"load": 1.0}) for number in range(5_000))
        assert recording._sample_at == clock.monotonic() + 100.0
        rows = "SELECT count(DISTINCT owner) FROM history"
        assert stores.database.read_now(lambda c: c.execute(rows).fetchone()) == (5_001,)

    with_stores(tmp_path, test)


def test_condensed_jobs_are_forgotten_once_deleted(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        recording = HubSampler(stores, clock=VirtualClock())
        recording._condensed.add("deleted")
        await recording.tick([])
        assert not recording._condensed

    with_stores(tmp_path, test)


def test_a_month_of_100_nodes_stays_below_a_gigabyte(tmp_path: Path) -> None:
    """Two nodes for a month, each with a member of a new job every day; then times fifty.

    Everything is written as in real use, but fine buckets only where they would still be kept.
    """
    nodes = 2
    clock = VirtualClock()
    clock.advance(1e9)
    database = Database(tmp_path / "hub.sqlite", schemas=[SCHEMA, METRICS_SCHEMA])
    history = History(database, clock=clock)
    metrics = Metrics(database, jobs_dir=tmp_path / "jobs")
    owners = [f"node/n{n}" for n in range(nodes)]
    end = clock.wall() + DAYS * DAY_S
    clock.advance(DAYS * DAY_S)

    async def write() -> None:
        for owner, values in [(o, STATS) for o in owners] + [
            (f"job-{day}/w{n}", {**MEMBER, "step": 10_000.0})
            for day in range(DAYS)
            for n in range(nodes)
        ]:
            whole = owner.startswith("node/")
            day = 0 if whole else int(owner.split("/")[0].split("-")[1])
            first = end - (DAYS - day) * DAY_S
            last = end if whole else first + DAY_S
            for width, kept_s in KEPT_S.items():
                if width == 10 and not whole:
                    continue
                start = max(first, end - kept_s)
                rows = {
                    (owner, width, int(start + at) // width * width): {
                        name: history_module.Summary(9, value, value, value)
                        for name, value in values.items()
                    }
                    for at in range(0, max(0, int(last - start)), width)
                }
                await database.write(partial(_write_rows, history, rows))
        for day in range(DAYS):
            count = MAX_POINTS if day == DAYS - 1 else CONDENSED_POINTS
            for n in range(nodes):
                points = [Point(1e9 + at, at * 10, at, MEMBER) for at in range(count)]
                await metrics.add(f"job-{day}", f"w{n}", incarnation="i", seq=1, points=points)

    asyncio.run(write())
    database.write_now(lambda c: None)
    database.close()
    nbytes = (tmp_path / "hub.sqlite").stat().st_size * NODES / nodes
    assert 1e8 < nbytes < 1e9, f"{nbytes / 1e6:.0f} MB"


def _write_rows(history: History, rows: Any, connection: sqlite3.Connection) -> None:
    for place, figures in rows.items():
        history._write_row(connection, place, figures)


def test_the_points_of_an_ended_job_are_thinned_to_both_ends(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        metrics = stores.metrics
        points = [Point(float(n), n, n, {"loss": 1.0}) for n in range(1000)]
        held_out = [Point(1e3, 1000, 1000, {"held_out_loss_sum": 5.0, "held_out_tokens": 2.0})]
        await metrics.add("j", "w0", incarnation="i", seq=1, points=[*points, *held_out])
        await metrics.condense("j")
        stored = await metrics.read("j", limit=5000)
        steps = [point["step"] for point in stored]
        assert CONDENSED_POINTS / 2 <= len(steps) <= CONDENSED_POINTS + 1
        assert steps[0] < 20
        assert steps[-2:] == [999, 1000]
        assert max(b - a for a, b in itertools.pairwise(steps)) <= 20

    with_stores(tmp_path, test)


def test_thinned_curves_keep_every_evaluation(tmp_path: Path) -> None:
    async def test(stores: Any) -> None:
        for member in ("w0", "w1"):
            points = [Point(float(n), n, n, {"loss": 1.0}) for n in range(1, 1001)]
            points[499] = Point(500.0, 500, 500, {"held_out_loss": 2.0})
            await stores.metrics.add("j", member, incarnation="i", seq=1, points=points)
        found = await stores.metrics.curves("j", points=100)
        own = [point["step"] for point in found if point["member"] == "w1"]
        assert 90 <= len(own) <= 102
        assert own == sorted(own)
        assert (500 in own, own[-1]) == (True, 1000)
        assert len(await stores.metrics.curves("j", points=5000)) == 2000

    with_stores(tmp_path, test)


def test_held_out_points_of_all_members_are_thinned_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.observability.metrics.MAX_HELD_OUT", 20)

    async def test(stores: Any) -> None:
        for member in ("w0", "w1"):
            for n in range(1, 101):
                share = Point(float(n), n, n, {"held_out_loss_sum": 5.0, "held_out_tokens": 2.0})
                await stores.metrics.add("j", member, incarnation="i", seq=n, points=[share])
        stored = await stores.metrics.read("j", limit=5000)
        by_member = [
            [p["round"] for p in stored if p["member"] == member] for member in ("w0", "w1")
        ]
        assert by_member[0] == by_member[1]
        assert 5 <= len(by_member[0]) <= 21
        assert by_member[0][-1] == 100

    with_stores(tmp_path, test)


def test_held_out_points_without_rounds_are_thinned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that takes part in no rounds reports round 0, which every stride divides."""
    monkeypatch.setattr("atoll.hub.observability.metrics.MAX_HELD_OUT", 20)

    async def test(stores: Any) -> None:
        for n in range(1, 101):
            one = Point(float(n), n, 0, {"held_out_loss": 2.0})
            await stores.metrics.add("j", "w0", incarnation="i", seq=n, points=[one])
        steps = [p["step"] for p in await stores.metrics.read("j", limit=5000)]
        assert (steps[0], steps[-1]) == (1, 100)
        assert 15 <= len(steps) <= 21

    with_stores(tmp_path, test)
